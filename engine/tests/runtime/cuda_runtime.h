#pragma once

// As much of the CUDA runtime as expert-cuda-stream.cu calls, on threads: a stream is a thread that runs what was queued in order, an
// event remembers how often it was recorded and how many of those records were reached. "Device" memory is host memory. A device is a
// number, current in a thread, that streams and events are created on.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

enum cudaError_t {
    cudaSuccess                    = 0,
    cudaErrorInvalidValue          = 1,
    cudaErrorMemoryAllocation      = 2,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady              = 600,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

namespace runtime {

inline std::atomic<int> n_unrecorded_waits { 0 }; // on an event that nobody recorded: CUDA does not wait then
inline std::atomic<int> n_events { 0 };           // that exist
inline std::atomic<int> n_streams { 0 };          // that exist

// Work queued while its stream's device is not current, which CUDA refuses for kernels only, or with an event of another device.
inline std::atomic<int> n_foreign { 0 };

inline thread_local int current_device = 0;

inline thread_local int n_creations_left = -1; // of streams and events by this thread, until one fails; negative: all succeed
inline std::atomic<int> n_copies_left { -1 };  // by any thread, likewise

inline bool creation_fails() {
    return n_creations_left >= 0 && n_creations_left-- == 0;
}

struct event {
    const int               device = current_device;
    std::shared_ptr<event>  self; // until destroyed: streams have it as long as they use it
    std::mutex              lock;
    std::condition_variable changed;
    uint64_t                recorded = 0;
    uint64_t                reached  = 0;
    double                  ms       = 0; // at the last record reached

    void wait(uint64_t nth) {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return reached >= nth; });
    }

    uint64_t records() {
        std::lock_guard<std::mutex> guard(lock);
        return recorded;
    }

    uint64_t reaches() {
        std::lock_guard<std::mutex> guard(lock);
        return reached;
    }
};

struct stream {
    const int                         device = current_device;
    std::mutex                        lock;
    std::condition_variable           changed;
    std::deque<std::function<void()>> queue;
    bool                              busy     = false;
    bool                              stopping = false;
    std::thread                       thread { [this] { run(); } };

    ~stream() {
        {
            std::lock_guard<std::mutex> guard(lock);
            stopping = true;
        }
        changed.notify_all();
        thread.join();
    }

    void push(std::function<void()> work) {
        {
            std::lock_guard<std::mutex> guard(lock);
            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return queue.empty() && !busy; });
    }

  private:
    void run() {
        std::unique_lock<std::mutex> guard(lock);
        while (true) {
            changed.wait(guard, [&] { return stopping || !queue.empty(); });
            if (queue.empty()) {
                return;
            }
            const auto work = std::move(queue.front());
            queue.pop_front();
            busy = true;
            guard.unlock();
            work();
            guard.lock();
            busy = false;
            changed.notify_all();
        }
    }
};

inline void count_foreign(const stream * stream, const event * event = nullptr) {
    n_foreign += stream->device != current_device || (event && event->device != stream->device);
}

} // namespace runtime

using cudaEvent_t  = runtime::event *;
using cudaStream_t = runtime::stream *;

inline cudaError_t cudaGetDevice(int * device) { *device = runtime::current_device; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device)   { runtime::current_device = device; return cudaSuccess; }
inline cudaError_t cudaGetLastError()          { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError()       { return cudaSuccess; }

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    if (runtime::creation_fails()) {
        return cudaErrorMemoryAllocation;
    }
    *stream = new runtime::stream;
    ++runtime::n_streams;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream)                 { stream->synchronize(); return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream)                     { delete stream; --runtime::n_streams; return cudaSuccess; }

inline cudaError_t cudaEventCreate(cudaEvent_t * event) {
    if (runtime::creation_fails()) {
        return cudaErrorMemoryAllocation;
    }
    const auto created = std::make_shared<runtime::event>();
    created->self = created;
    *event        = created.get();
    ++runtime::n_events;
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) { return cudaEventCreate(event); }

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const auto last = std::move(event->self);
    --runtime::n_events;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    runtime::count_foreign(stream, event);
    if (event->device != stream->device) {
        return cudaErrorInvalidResourceHandle;
    }
    {
        std::lock_guard<std::mutex> guard(event->lock);
        ++event->recorded;
    }
    stream->push([event = event->self] {
        std::lock_guard<std::mutex> guard(event->lock);
        ++event->reached;
        event->ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
        event->changed.notify_all();
    });
    return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    runtime::count_foreign(stream, event);
    const uint64_t nth = event->records();
    runtime::n_unrecorded_waits += nth == 0;
    stream->push([event = event->self, nth] { event->wait(nth); });
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) { event->wait(event->records()); return cudaSuccess; }

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> guard(event->lock);
    return event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (float) (end->ms - begin->ms);
    return begin->device == end->device ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

inline cudaError_t cudaMemcpyAsync(void * dst, const void * src, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    runtime::count_foreign(stream);
    if (runtime::n_copies_left >= 0 && runtime::n_copies_left-- == 0) {
        return cudaErrorInvalidValue;
    }
    stream->push([=] { std::memcpy(dst, src, size); });
    return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void * dst, int value, size_t size, cudaStream_t stream) {
    runtime::count_foreign(stream);
    stream->push([=] { std::memset(dst, value, size); });
    return cudaSuccess;
}
