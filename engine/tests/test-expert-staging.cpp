// expert-staging: what arrives, in which order, with any number of threads, sizes that are no multiple of a chunk, and an early end.

#include "check.h"

#include "expert-staging.h"

#include <atomic>
#include <memory>
#include <numeric>

namespace {

constexpr size_t CHUNK = 64;

// A device whose copies happen late: a send is only noted, and done when its chunk is claimed again or at the end.
struct late_device {
    std::vector<uint8_t>     memory;
    std::vector<std::pair<uint8_t *, size_t>> pending; // by chunk
    std::vector<std::string> log;
    std::mutex               lock;

    explicit late_device(int n_threads) :
            memory(CHUNK*n_threads*phase_stager::CHUNKS_PER_THREAD), pending(n_threads*phase_stager::CHUNKS_PER_THREAD) {}

    void finish(int chunk) {
        std::lock_guard<std::mutex> guard(lock);
        if (pending[chunk].first) {
            std::memcpy(pending[chunk].first, memory.data() + chunk*CHUNK, pending[chunk].second);
            pending[chunk] = {};
        }
    }

    phase_stage_effects effects() {
        phase_stage_effects out;
        out.reclaim = [this](int chunk) { finish(chunk); };
        out.begin   = [this](int tag) { log.push_back("begin " + std::to_string(tag)); };
        out.send    = [this](int chunk, uint8_t * dst, size_t size) {
            std::lock_guard<std::mutex> guard(lock);
            pending[chunk] = { dst, size };
            log.push_back("send");
        };
        out.end = [this](int tag) { log.push_back("end " + std::to_string(tag)); };
        return out;
    }

    void finish_all() {
        for (size_t chunk = 0; chunk < pending.size(); ++chunk) {
            finish((int) chunk);
        }
    }
};

std::vector<uint8_t> numbers(size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<uint8_t> out(n);
    for (auto & byte : out) {
        byte = (uint8_t) random();
    }
    return out;
}

} // namespace

TEST(all_bytes_arrive_and_jobs_do_not_mix) {
    for (int n_threads : { 1, 2, 5 }) {
        late_device device(n_threads);
        std::vector<std::vector<uint8_t>> from, to;
        {
            phase_stager stager(device.memory.data(), CHUNK, n_threads, device.effects());
            uint64_t last = 0;
            for (int i = 0; i < 40; ++i) {
                from.push_back(numbers(1 + 97*i, i));
                to.emplace_back(from.back().size());
            }
            for (int i = 0; i < 40; ++i) {
                const size_t half = from[i].size()/2; // two pieces each, the first one empty once
                last = stager.submit({ { to[i].data(), from[i].data(), half }, { to[i].data() + half, from[i].data() + half, from[i].size() - half } }, i);
                CHECK_EQ(last, (uint64_t) i);
            }
            stager.wait(last);
        }
        device.finish_all();
        CHECK(from == to);

        int open = -1, n_ended = 0;
        for (const auto & line : device.log) {
            if (line.rfind("begin ", 0) == 0) {
                CHECK_EQ(open, -1);
                open = std::stoi(line.substr(6));
                CHECK_EQ(open, n_ended);
            } else if (line.rfind("end ", 0) == 0) {
                CHECK_EQ(std::stoi(line.substr(4)), open);
                open = -1;
                ++n_ended;
            } else {
                CHECK(open >= 0);
            }
        }
        CHECK_EQ(n_ended, 40);
    }
}

TEST(waiting_for_one_job_does_not_wait_for_the_next) {
    late_device device(2);
    const auto from = numbers(CHUNK*9, 1);
    std::vector<uint8_t> to(from.size());
    phase_stager stager(device.memory.data(), CHUNK, 2, device.effects());
    const uint64_t one = stager.submit({ { to.data(), from.data(), from.size() } }, 0);
    stager.wait(one);
    const uint64_t two = stager.submit({ { to.data(), from.data(), from.size() } }, 1);
    stager.wait(one);
    stager.wait(two);
    CHECK_EQ(two, one + 1);
}

TEST(an_empty_job_ends) {
    late_device device(1);
    uint8_t byte = 7, to = 0;
    phase_stager stager(device.memory.data(), CHUNK, 1, device.effects());
    stager.wait(stager.submit({}, 0));
    const uint64_t full = stager.submit({ { &to, &byte, 1 } }, 1);
    const uint64_t last = stager.submit({}, 2);
    stager.wait(full);
    stager.wait(last);
    CHECK_EQ(device.log.back(), std::string("end 2"));
}

TEST(ends_in_the_middle_of_jobs) {
    for (int round = 0; round < 30; ++round) {
        late_device device(3);
        const auto from = numbers(CHUNK*200, round);
        std::vector<uint8_t> to(from.size());
        std::atomic<int> started { 0 };
        auto effects = device.effects();
        effects.start = [&] { ++started; };
        {
            phase_stager stager(device.memory.data(), CHUNK, 3, effects);
            for (int i = 0; i < 5; ++i) {
                stager.submit({ { to.data(), from.data(), from.size() } }, i);
            }
            if (round % 2) {
                stager.wait(0);
            }
        }
        CHECK_EQ(started.load(), 3);
    }
}

TEST_MAIN("test-expert-staging")
