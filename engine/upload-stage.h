#pragma once

// Pinned memory through which small pieces of data go to a device together: written by the host round and round, read by one kernel per
// flush. Header only, no ggml.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

// A copy from pinned memory to a device.
struct phase_upload_piece {
    const uint8_t * src;
    uint8_t       * dst;
    uint32_t        size; // bytes
};

constexpr int32_t PHASE_UPLOAD_PIECES = 32; // of one kernel

struct upload_stage_effects {
    std::function<void(const phase_upload_piece * pieces, int32_t n)> send;        // queues; the pieces are read during the call
    std::function<void()>                                             synchronize; // waits for all that was sent
};

// Invariant: no byte is written while a kernel may still read it. The device has caught up when the stage begins anew.
class upload_stage {
  public:
    static constexpr size_t ALIGNMENT = 16; // the kernel's widest load

    // memory: `capacity` bytes, aligned
    upload_stage(uint8_t * memory, size_t capacity, upload_stage_effects effects) :
            memory(memory), capacity(capacity), effects(std::move(effects)) {}

    // False: too large to go this way, more than a quarter of the stage.
    bool add(const void * data, size_t size, void * dst) {
        if (size > capacity/4) {
            return false;
        }
        if (used + size > capacity || pieces.size() == PHASE_UPLOAD_PIECES) {
            flush();
        }
        if (used + size > capacity) {
            effects.synchronize();
            used = 0;
        }
        std::memcpy(memory + used, data, size);
        pieces.push_back({ memory + used, (uint8_t *) dst, (uint32_t) size });
        used += (size + ALIGNMENT - 1)/ALIGNMENT*ALIGNMENT;
        return true;
    }

    void flush() {
        if (!pieces.empty()) {
            effects.send(pieces.data(), (int32_t) pieces.size());
            pieces.clear();
        }
    }

  private:
    uint8_t * const      memory;
    const size_t         capacity;
    upload_stage_effects effects;

    size_t                          used = 0;
    std::vector<phase_upload_piece> pieces;
};
