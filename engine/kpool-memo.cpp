#include "kpool-memo.h"

#include <algorithm>
#include <cstring>

static constexpr uint16_t F16_ZERO = 0x0000;
static constexpr uint16_t F16_DROP = 0xfc00; // minus infinity

void phase_kpool_memo::clear() {
    pcell.clear();
    pidx.clear();
    end.clear();
    row.clear();
    n_row = 0;
}

void phase_kpool_memo::rewind(const cell_list & cells, size_t n_cells, size_t n_pools, size_t kpool) {
    if (pcell.size() > n_pools) {
        pcell.resize(n_pools);
        pidx.resize(n_pools*kpool);
        end.resize(n_pools);
    }
    for (; n_row > n_cells; --n_row) {
        row[cells[n_row - 1].second] = F16_DROP;
    }
}

void phase_kpool_memo::extend_pools(const cell_list & cells, const std::vector<uint32_t> & pools, size_t kpool) {
    for (size_t i = pcell.size(); i < pools.size(); ++i) {
        const auto * members = &cells[pools[i]];
        for (size_t k = 0; k < kpool; ++k) {
            pidx.push_back((int32_t) members[k].second);
        }
        pcell.push_back((int32_t) members[kpool - 1].second);
        end.push_back(members[kpool - 1].first);
    }
}

void phase_kpool_memo::extend_row(const cell_list & cells, size_t n_kv) {
    if (row.size() != n_kv) {
        row.assign(n_kv, F16_DROP);
        n_row = 0;
    }
    for (; n_row < cells.size(); ++n_row) {
        row[cells[n_row].second] = F16_ZERO;
    }
}

void phase_kpool_copy(const phase_kpool_memo & memo, size_t n, size_t kpool, int64_t base, int32_t inert, int32_t * pcell, int32_t * pidx,
        std::vector<int32_t> & end) {
    if (base == 0) {
        std::copy_n(memo.pcell.begin(), n, pcell);
    } else {
        std::transform(memo.pcell.begin(), memo.pcell.begin() + n, pcell, [&](int32_t cell) { return (int32_t) (base + cell); });
    }
    if (inert >= 0) {
        std::fill_n(pidx, n*kpool, inert);
    } else {
        std::copy_n(memo.pidx.begin(), n*kpool, pidx);
    }
    end.insert(end.end(), memo.end.begin(), memo.end.begin() + n);
}

size_t phase_kpool_unmarked(const std::vector<uint32_t> & marks, size_t begin, size_t n, uint32_t generation) {
    const auto first = marks.begin() + begin;
    return std::find(first, first + n, generation) - first;
}

std::vector<int64_t> phase_kpool_low_cells(const int32_t * pcell, size_t n, size_t n_free) {
    for (int64_t bound = 4*(int64_t) n_free + 64; ; bound *= 4) {
        std::vector<int64_t> low;
        for (size_t i = 0; i < n; ++i) {
            if (pcell[i] < bound) {
                low.push_back(pcell[i]);
            }
        }
        if (bound - (int64_t) low.size() >= (int64_t) n_free || low.size() == n) {
            return low;
        }
    }
}

bool phase_kpool_mask(const phase_kpool_memo & memo, const phase_kpool_memo::cell_list & cells, int32_t pos, size_t n_kv, uint16_t * row) {
    const auto at = std::lower_bound(cells.begin(), cells.end(), std::make_pair(pos, 0u));
    if (at != cells.end() && at + 1 != cells.end() && (at + 1)->first == pos) {
        return false;
    }
    std::memcpy(row, memo.row.data(), n_kv*sizeof(*row));
    for (auto it = cells.rbegin(); it != cells.rend() && it->first > pos; ++it) {
        if (it->second < n_kv) {
            row[it->second] = F16_DROP;
        }
    }
    return true;
}
