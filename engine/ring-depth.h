#pragma once

// How many layers deep a ring is when nobody says. Pure.

#include <algorithm>
#include <cstdint>

inline constexpr int32_t RING_REGIONS_LEAST = 3;

// One device: a layer is computed while the next two arrive, more would only wait. Several, each with layers of its own, take turns, and a link
// idles in the turns of the others once its ring is full. With room for what arrives meanwhile, and the layer that was computed last, all
// links are busy all the time. `n_layers`: of the device that has most.
inline int32_t ring_depth(int32_t n_devices, int32_t n_layers) {
    return std::max(RING_REGIONS_LEAST, n_devices > 1 ? n_layers - n_layers/n_devices + 1 : 0);
}
