#pragma once

// Pieces of host memory that are registered with a driver, and where a copy from there has to be cut. Pure; not for several threads.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

class phase_pinned_pieces {
  public:
    // Pieces do not overlap; they may touch.
    void add(const void * begin, size_t size) { ends[(uintptr_t) begin] = (uintptr_t) begin + size; }
    void remove(const void * begin) { ends.erase((uintptr_t) begin); }

    // How many bytes from `at` on, at most `size`, are all in the same piece, or all in none.
    size_t run(const void * at, size_t size) const {
        const auto address = (uintptr_t) at;
        const auto next    = ends.upper_bound(address);
        const bool inside  = next != ends.begin() && address < std::prev(next)->second;
        if (inside) {
            return std::min<size_t>(size, std::prev(next)->second - address);
        }
        return next == ends.end() ? size : std::min<size_t>(size, next->first - address);
    }

  private:
    std::map<uintptr_t, uintptr_t> ends; // by begin
};
