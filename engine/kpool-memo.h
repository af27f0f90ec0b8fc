#pragma once

// What the host fills in at every step for the indexer of one sequence, kept from step to step, so that a step costs what is new in it
// and not what is in the context. Plain data and std only. Everything here is equal, byte for byte, to what is computed without it.
//
// The layout of a sequence (llama_memory_hybrid_idx::kpool_layout::seq) grows at its end, is rewound to a position, or is built anew;
// the memo follows: extend, rewind, clear.
//
//   cells   (pos, cell) sorted, cell local to the stream          pools   index in `cells` of each pool's first member

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

struct phase_kpool_memo {
    using cell_list = std::vector<std::pair<int32_t, uint32_t>>;

    std::vector<int32_t>  pcell;  // per pool: the cell, in its stream, that holds the pooled key
    std::vector<int32_t>  pidx;   // per pool: the cells of its kpool members
    std::vector<int32_t>  end;    // per pool: position of the last member
    std::vector<uint16_t> row;    // f16 mask: 0 for the first n_row of `cells`, minus infinity elsewhere
    size_t                n_row = 0;

    void clear();

    // The first n_cells of `cells` and n_pools of the pools stay; called before `cells` is cut.
    void rewind(const cell_list & cells, size_t n_cells, size_t n_pools, size_t kpool);

    // Takes in what was appended. `n_kv` is the size of a stream.
    void extend_pools(const cell_list & cells, const std::vector<uint32_t> & pools, size_t kpool);
    void extend_row(const cell_list & cells, size_t n_kv);
};

// The first pools of a sequence, until `n`: writes cell (+ `base`), members (`inert` when that is not negative) and last positions.
void phase_kpool_copy(const phase_kpool_memo & memo, size_t n, size_t kpool, int64_t base, int32_t inert, int32_t * pcell, int32_t * pidx,
        std::vector<int32_t> & end);

// How many entries from `begin` on are not `generation`, at most `n`.
size_t phase_kpool_unmarked(const std::vector<uint32_t> & marks, size_t begin, size_t n, uint32_t generation);

// The cells below a bound under which `n_free` cells are not among the first `n` of `pcell`: to find the n_free smallest free cells, no
// others are needed. Not sorted.
std::vector<int64_t> phase_kpool_low_cells(const int32_t * pcell, size_t n, size_t n_free);

// The causal mask of a token at position `pos`, `n_kv` wide. False, with nothing written, when several cells are at that position: then
// more than positions decides.
bool phase_kpool_mask(const phase_kpool_memo & memo, const phase_kpool_memo::cell_list & cells, int32_t pos, size_t n_kv, uint16_t * row);

// LLAMA_PHASE_SELECT=fast, or auto and there are phases or K/V of sparse attention in host memory. May become true at any context that is
// made, never false again: a memo that nothing was put in yet is an empty one.
bool phase_select_is_fast();

//
// Called by src/llama-memory-hybrid-idx.cpp; with LLAMA_PHASE_SELECT=stock they do nothing.
// `seq` is kpool_layout::seq, which holds pos_min, shared, cells, pools, j_next and a memo; `state` is kpool_state.
//

struct phase_kpool_seq {
    const phase_kpool_memo            * memo  = nullptr;
    const phase_kpool_memo::cell_list * cells = nullptr;
};

template <typename seq>
phase_kpool_seq phase_kpool_seq_of(const seq & sq, size_t n_kv) {
    sq.memo.extend_row(sq.cells, n_kv);
    return { &sq.memo, &sq.cells };
}

// Cuts a sequence off at the position from which it was edited, instead of having it built anew from its `set` of (pos, cell): what
// lies before is as it was. Pools of consecutive cells only.
template <typename seq, typename set>
bool phase_kpool_rewind(seq & sq, const set & now, int32_t pos, bool by_order, size_t kpool) {
    if (!phase_select_is_fast() || !by_order || sq.shared || now.empty() || sq.pos_min != now.begin()->first || pos <= sq.pos_min) {
        return false;
    }
    const size_t n_cells = std::lower_bound(sq.cells.begin(), sq.cells.end(), std::make_pair(pos, 0u)) - sq.cells.begin();
    const size_t n_pools = std::min(n_cells/kpool, sq.pools.size());
    sq.memo.rewind(sq.cells, n_cells, n_pools, kpool);
    sq.cells.resize(n_cells);
    sq.pools.resize(n_pools);
    sq.j_next = n_pools*kpool;
    return n_cells > 0;
}

// Fills in the pools before the first that is to be pooled again; returns how many.
template <typename seq, typename state>
size_t phase_kpool_fill(const seq & sq, const state & st, size_t kpool, int64_t base, int32_t inert, int32_t * pcell, int32_t * pidx,
        std::vector<int32_t> & end) {
    if (!phase_select_is_fast()) {
        return 0;
    }
    const size_t begin = end.size();
    sq.memo.extend_pools(sq.cells, sq.pools, kpool);
    const size_t n = phase_kpool_unmarked(st.is_new, begin, sq.pools.size(), st.generation);
    phase_kpool_copy(sq.memo, n, kpool, base, inert, pcell + begin, pidx + begin*kpool, end);
    return n;
}

// The cells of `pcell`, or enough of them to find the n_free smallest other cells.
inline std::vector<int64_t> phase_kpool_reps(const int32_t * pcell, size_t n, size_t n_free) {
    return phase_select_is_fast() ? phase_kpool_low_cells(pcell, n, n_free) : std::vector<int64_t>(pcell, pcell + n);
}
