#pragma once

// Graphs of small batches, one for each shape, so that generation whose batches change in size (drafts, their verification) finds the
// graph of a shape that came up before: upstream keeps the last one and builds, splits and allocates anew at each change, which also
// makes a backend capture it anew.
//
//   llama_context   scheduler, graphs, active graph   <── swapped ──>   kept: the same three, for a shape
//
// What is put in the context's place stays there until another shape or a larger batch comes, or until restore(). The schedulers share
// one set of compute buffers (lent-buffer.h), planned for the largest small batch and the full context, so that nothing grows during
// generation. A graph in keeping is reused only as upstream's rules allow (llm_graph_result::can_reuse).
//
// Called by phase-context, on the thread that decodes.

#include "lent-buffer.h"
#include "phase-stats.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

struct llama_context;

class phase_graphs {
  public:
    // `n_most`: shapes kept, the least recently used one goes first; 0: none. `fits` says whether what was just allocated may stay.
    phase_graphs(llama_context & ctx, uint32_t n_most, uint32_t n_tokens_most, std::function<bool()> fits);
    ~phase_graphs();

    phase_graphs(const phase_graphs &) = delete;
    phase_graphs & operator=(const phase_graphs &) = delete;

    // Puts what is kept for the shape of the next micro-batch in the context's place; the context's own for others. A shape is kept once it
    // comes back after another one: batches of one size need nothing. When there is no memory for it, no further ones are kept
    // until drop().
    void select(uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);

    // To be called when the graph of that micro-batch was built, before it is allocated. The allocator keeps its last plan where node counts
    // match and sizes suffice. What is an output, and so keeps its place to the end, may be another tensor, though: backend samplers have nodes
    // for all sequences, and outputs for those of the batch. So a graph of one node is planned, and the batch's gets places of its own.
    void give_places();

    // Puts the context's own back.
    void restore();

    // restore(), and frees what is kept.
    void drop();

    // Whether something was kept or freed since the last call.
    bool changed() { return std::exchange(is_changed, false); }

    size_t bytes(ggml_backend_t backend) const; // of compute buffers, the context's own included

    phase_graph_stats stats() const; // any thread

  private:
    struct shape {
        uint32_t n_tokens, n_seqs, n_outputs;

        bool operator==(const shape & other) const {
            return n_tokens == other.n_tokens && n_seqs == other.n_seqs && n_outputs == other.n_outputs;
        }
    };
    struct planned;

    void put_in_place(const shape & of);
    void swap_with_context(planned & with);
    bool make(const shape & of);
    void plan_buffers();
    size_t lent_bytes(ggml_backend_t backend) const;
    void count(uint32_t n_batches);

    llama_context &             ctx;
    const uint32_t              n_most;
    const uint32_t              n_tokens_most;
    const std::function<bool()> fits;

    std::unique_ptr<lent_buffers>         buffers; // outlives kept
    std::vector<std::unique_ptr<planned>> kept;            // the most recently used one last
    planned *                             in_use = nullptr; // of kept: in the context's place, and the context's own in it
    std::vector<shape>                    seen;             // small ones, the last one at the end
    bool                                  awaits_small = false; // the next graph that is built is of a small batch
    bool                                  full = false;
    bool                                  is_changed = false;

    int32_t                   n_reused_before = 0; // llama_context::n_reused, which others reset
    mutable std::mutex        lock;
    phase_graph_stats         counters;
};
