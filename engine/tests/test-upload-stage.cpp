// upload-stage: what arrives, however late the device reads, and when the host has to wait.

#include "check.h"

#include "upload-stage.h"

#include <algorithm>

namespace {

// Reads only when it has to: at a synchronize.
struct late_device {
    explicit late_device(size_t capacity) : memory(capacity) {}

    std::vector<uint8_t>            memory;
    std::vector<phase_upload_piece>  queue;
    std::vector<int32_t>             sent; // pieces of each kernel
    int                              n_synchronized = 0;

    void finish() {
        for (const auto & piece : queue) {
            std::copy_n(piece.src, piece.size, piece.dst);
        }
        queue.clear();
    }

    upload_stage_effects effects() {
        upload_stage_effects out;
        out.send = [this](const phase_upload_piece * pieces, int32_t n) {
            queue.insert(queue.end(), pieces, pieces + n);
            sent.push_back(n);
        };
        out.synchronize = [this] {
            finish();
            ++n_synchronized;
        };
        return out;
    }
};

TEST(everything_arrives_although_the_device_is_late) {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        late_device  device(1024);
        upload_stage stage(device.memory.data(), device.memory.size(), device.effects());

        std::vector<std::vector<uint8_t>> from, to;
        from.reserve(300);
        to.reserve(300);
        for (int i = 0; i < 300; ++i) {
            std::vector<uint8_t> data(1 + random() % 256);
            std::generate(data.begin(), data.end(), [&] { return (uint8_t) random(); });
            from.push_back(data);
            to.emplace_back(data.size(), 0);
            REQUIRE(stage.add(data.data(), data.size(), to.back().data()));
            std::fill(data.begin(), data.end(), 0); // the caller's memory is the caller's again
            if (random() % 8 == 0) {
                stage.flush();
            }
        }
        stage.flush();
        device.finish();
        CHECK(from == to);
        CHECK(device.n_synchronized > 0);
    }
}

TEST(pieces_are_aligned_and_a_kernel_has_at_most_its_number) {
    late_device  device(64*1024);
    upload_stage stage(device.memory.data(), device.memory.size(), device.effects());
    std::vector<uint8_t> to(100*3);
    for (int i = 0; i < 100; ++i) {
        REQUIRE(stage.add("abc", 3, to.data() + 3*i));
    }
    stage.flush();
    stage.flush(); // nothing to send
    CHECK(device.sent == (std::vector<int32_t>{ 32, 32, 32, 4 }));
    for (const auto & piece : device.queue) {
        CHECK_EQ((piece.src - device.memory.data()) % upload_stage::ALIGNMENT, size_t(0));
    }
    CHECK_EQ(device.n_synchronized, 0);
}

TEST(what_is_large_goes_another_way) {
    late_device  device(1024);
    upload_stage stage(device.memory.data(), device.memory.size(), device.effects());
    std::vector<uint8_t> data(257), to(257);
    CHECK(!stage.add(data.data(), 257, to.data()));
    CHECK(stage.add(data.data(), 256, to.data()));
    CHECK(stage.add(data.data(), 0, to.data()));
}

} // namespace

TEST_MAIN("test-upload-stage")
