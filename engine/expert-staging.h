#pragma once

// Copies host memory that a device cannot read in place. Threads copy it into chunks of pinned memory, from where the device's copy engine
// takes it, so that the two copies overlap:
//
//   host memory --memcpy by a thread--> chunk --send, queued by that thread--> device
//   thread 0    | chunk 0 | chunk 1 | chunk 0 ..      a thread owns two chunks, and takes one again when its send is over
//
// Jobs are sent in the order they were submitted: nothing of a job is sent before all of the one before was, so `begin` and `end` enclose
// its sends on a stream. Header only, since libllama (the CPU's ring) and ggml-cuda both have it.

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

struct phase_stage_piece {
    uint8_t       * dst; // as `send` takes it
    const uint8_t * src;
    size_t          size;
};

// Called with a lock held, so one at a time, except for `start` and `reclaim`. None may throw.
struct phase_stage_effects {
    std::function<void()>                                       start   = [] {};      // in each thread, first
    std::function<void(int chunk)>                              reclaim = [](int) {}; // waits until the chunk's last send is over
    std::function<void(int tag)>                                begin   = [](int) {}; // before a job's first send
    std::function<void(int chunk, uint8_t * dst, size_t size)> send;                 // queues a copy of the chunk's first bytes
    std::function<void(int tag)>                                end     = [](int) {}; // behind a job's last send
};

class phase_stager {
  public:
    static constexpr int CHUNKS_PER_THREAD = 2;

    // `memory`: n_threads*CHUNKS_PER_THREAD chunks
    phase_stager(uint8_t * memory, size_t chunk_bytes, int n_threads, phase_stage_effects effects) :
            memory(memory), chunk_bytes(chunk_bytes), effects(std::move(effects)) {
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([this, i] { run(i*CHUNKS_PER_THREAD); });
        }
    }

    // Jobs that are not sent yet are dropped; sends that were queued are the caller's to wait for.
    ~phase_stager() {
        {
            std::lock_guard<std::mutex> guard(lock);
            stopping = true;
        }
        changed.notify_all();
        for (auto & thread : threads) {
            thread.join();
        }
    }

    phase_stager(const phase_stager &) = delete;
    phase_stager & operator=(const phase_stager &) = delete;

    // Returns the number of the job. `tag` is what begin and end are told.
    uint64_t submit(const std::vector<phase_stage_piece> & pieces, int tag) {
        job next;
        next.tag = tag;
        for (const auto & piece : pieces) {
            for (size_t offset = 0; offset < piece.size; offset += chunk_bytes) {
                next.parts.push_back({ piece.dst + offset, piece.src + offset, std::min(chunk_bytes, piece.size - offset) });
            }
        }
        std::unique_lock<std::mutex> guard(lock);
        const uint64_t number = first + jobs.size();
        jobs.push_back(std::move(next));
        finish_empty();
        guard.unlock();
        changed.notify_all();
        return number;
    }

    // Returns when all of the job was sent.
    void wait(uint64_t number) {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return first > number; });
    }

  private:
    struct job {
        std::vector<phase_stage_piece> parts;
        size_t                         taken = 0;
        size_t                         sent  = 0;
        int                            tag   = 0;
        bool                           begun = false;
    };

    // a job without parts has nobody to end it
    void finish_empty() {
        while (!jobs.empty() && jobs.front().parts.empty()) {
            effects.begin(jobs.front().tag);
            effects.end(jobs.front().tag);
            jobs.pop_front();
            ++first;
        }
    }

    void run(int chunk) {
        effects.start();
        const int first_chunk = chunk;
        std::unique_lock<std::mutex> guard(lock);
        while (true) {
            uint64_t          number = 0;
            phase_stage_piece part   = {};
            changed.wait(guard, [&] { return stopping || take(number, part); });
            if (stopping) {
                return;
            }
            guard.unlock();
            effects.reclaim(chunk);
            std::memcpy(memory + chunk*chunk_bytes, part.src, part.size);
            guard.lock();

            changed.wait(guard, [&] { return stopping || first == number; });
            if (stopping) {
                return;
            }
            auto & current = jobs.front();
            if (!current.begun) {
                effects.begin(current.tag);
                current.begun = true;
            }
            effects.send(chunk, part.dst, part.size);
            chunk = first_chunk + (chunk - first_chunk + 1) % CHUNKS_PER_THREAD;
            if (++current.sent == current.parts.size()) {
                effects.end(current.tag);
                jobs.pop_front();
                ++first;
                finish_empty();
                changed.notify_all();
            }
        }
    }

    // The next part of the oldest job that has one. Threads may be ahead with a later job's parts, but not send them.
    bool take(uint64_t & number, phase_stage_piece & part) {
        for (size_t i = 0; i < jobs.size(); ++i) {
            if (jobs[i].taken < jobs[i].parts.size()) {
                number = first + i;
                part   = jobs[i].parts[jobs[i].taken++];
                return true;
            }
        }
        return false;
    }

    uint8_t * const           memory;
    const size_t              chunk_bytes;
    const phase_stage_effects effects;

    std::mutex              lock;
    std::condition_variable changed;
    std::deque<job>         jobs;      // not sent yet, `first` is the number of the front one
    uint64_t                first = 0;
    bool                    stopping = false;

    std::vector<std::thread> threads; // last: they use all of the above
};
