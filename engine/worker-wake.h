#pragma once

// When the server's worker thread is needed. While a batch is computed it takes tasks that only read the server's state; of the others each is
// declined and put back. The main thread waits behind it once it is awake, so it sleeps on when the only task is the one that the
// server posts itself at every token.
//
// Called by tools/server/server-queue.cpp with its lock held: when a yield begins, and behind each task that is posted.

#include <algorithm>

// `worker` has cv, busy and yielding; `own` is the type of the server's own task.
template <typename Worker, typename Tasks, typename Type>
void phase_wake_worker(Worker & worker, const Tasks & tasks, Type own) {
    if (worker.yielding && !worker.busy && std::any_of(tasks.begin(), tasks.end(), [own](const auto & task) { return task.type != own; })) {
        worker.busy = true; // until it has seen the end of the yield
        worker.cv.notify_one();
    }
}
