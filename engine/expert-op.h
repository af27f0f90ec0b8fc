#pragma once

// What the graph operators, fetch, prefetch and stream, hand from the graph (libllama) to the backend that runs them. All are
// GGML_OP_CUSTOM nodes whose userdata points to one of the structs below; the struct lives as long as its context, its
// addresses change only between graphs (a transaction drops every graph first).
//
//   fetch   src[0] ids    I32 [n_used, n_tokens], rows may be strided
//           src[1] state  I32, layout below
//           src[2..]      arena tensors, like the experts with n_slots in place of n_expert
//           last two      when there is a prefetch for this layer: its node and that node's x, so that their memory stays theirs
//           dst           I32 [n_used, n_tokens]: slot of each id
//
//   prefetch  guesses what the next layer will choose, from this layer's activations, and copies beside the computation. It stands
//           in front of this layer's fetch; the next layer's fetch waits for it. A wrong guess costs link time, never a result.
//           src[0] x      F32 [n_embd, n_tokens], input of this layer's experts
//           src[1] router F32, F16 or BF16 [n_embd, n_expert] of the next layer
//           src[2] state, src[3..] arena tensors of the next layer
//           dst           I32 [n_expert + 2*n_predict, n_tokens], scratch in three blocks without gaps:
//                         | scores[n_tokens][n_expert] | ids[n_tokens][n_predict] | slots[n_tokens][n_predict] |
//
//   stream  src[0] ids, src[1] state, src[2..] ring tensors shaped like the whole experts
//           dst           I32 [n_used, n_tokens]: the ids
//
//   select  the rows that sparse attention reads, for a few tokens (phase-select.h)
//           src[0] score F32 [n_pool, n_tokens], src[1] top_k I32 [n_top, n_tokens], src[2] pool cells I32 [kpool, n_pool],
//           src[3] tail cells I32 [n_tail, n_tokens], src[4] mask F16 [n_kv, n_tokens], all without gaps
//           dst           F16 [phase_select_halves()], in three blocks without gaps:
//                         | mask[n_tokens][n_kv] | rows I32 [n_tokens][n_sel] | counts I32 [n_tokens] |
//           rows are the columns of mask that are not minus infinity, ascending, -1 behind the last; the CPU leaves them out
//
//   score   of pools, for a few tokens, from the pooled keys where they are (phase-select.h)
//           src[0] queries F32 [n_embd, n_head, n_tokens], src[1] keys F16 [n_embd, n_cells], rows may be strided,
//           src[2] cells I32 [n_pool], src[3] mask F16 [n_pool, n_tokens]
//           op_params: F32 weight of every head, at PHASE_SCORE_PARAM
//           dst           F32 [n_pool, n_tokens]: sum over heads of weight * max(0, query . key), plus mask
//
// The nodes are named phase_fetch, phase_prefetch, phase_stream, phase_select and phase_score and must keep those names: a backend looks at userdata only then, since that of
// other custom nodes may point to anything.
//
// State of a layer, 32-bit words in the memory of the device that owns the layer, one block:
//
//   | seen[n_expert] | slot_of[n_expert] | expert_of[n_slots] | stamp[n_slots] | clock | n_jobs | jobs[2*PHASE_MAX_IDS] |
//
//   slot_of    slot of an expert, -1: not resident          stamp   clock of the last use, 0: never
//   expert_of  expert in a slot, -1: empty                  clock   +1 per fetch; at INT32_MAX all stamps restart from 0
//   seen       how often the last PHASE_SEEN_TOKENS tokens of a micro-batch chose the expert (stream adds, the host clears)
//   jobs       (expert, slot) pairs that this fetch or fill has to copy
//
// Policy of fetch, the same in slot-policy.cpp and in the CUDA kernel: first every id of the batch that is resident gets the new
// stamp; then the missing ones, in the order of their first appearance (id index t*n_used + k), take the slot with the smallest
// stamp, the lowest slot of equals. Slots used by this batch carry the newest stamp, so they are never taken as long as the
// batch has at most n_slots distinct experts, which the graph guarantees.
//
// Policy of fill, between graphs, the same two places: of a list of wanted experts those that are not resident take empty slots, the first
// of the list the lowest slot, until none is empty. What a token brought stays. The clock of a state that is to be filled starts above
// the stamps that the host gives them, so they are older than what tokens use, in the order of the list.

#include <cstddef>
#include <cstdint>

struct ggml_backend_device;
struct ggml_tensor;
struct phase_upload_piece; // upload-stage.h
struct phase_kv_rows;
struct phase_kv_rows_counters;
struct phase_kv_rows_shape;

constexpr uint32_t PHASE_OP_MAGIC    = 0x6c6c7068; // first word of the structs
constexpr int32_t  PHASE_MAX_IDS     = 1024;       // ids of one fetch
constexpr int32_t  PHASE_MAX_TENSORS = 3;          // gate, up, down; or gate_up, down
constexpr int32_t  PHASE_SEEN_TOKENS = 256;

enum phase_op_kind : uint32_t {
    PHASE_OP_FETCH    = 1,
    PHASE_OP_STREAM   = 2,
    PHASE_OP_PREFETCH = 3,
    PHASE_OP_SELECT   = 4,
    PHASE_OP_SCORE    = 5,
};

// what all the structs begin with; all that select and score need
struct phase_op_head {
    uint32_t      magic;
    phase_op_kind kind;
};

constexpr int     PHASE_SCORE_PARAM  = 12;     // index of a float in op_params, behind what ggml keeps there
constexpr int     PHASE_SCORE_EMBD   = 128;    // the shape that CUDA has
constexpr int     PHASE_SCORE_HEADS  = 4;
constexpr int64_t PHASE_SCORE_TOKENS = 7;      // for more, upstream's kernel adds in another order
constexpr int64_t PHASE_SELECT_CELLS = 786432; // a bit for each in shared memory

// halves of a select node; n_kv is a multiple of 32
constexpr int64_t phase_select_halves(int64_t n_kv, int64_t n_tokens, int64_t n_sel) {
    return n_tokens*(n_kv + 2*(n_sel + 1));
}

// Written by the operator, read by the host at any time; in memory that host and device share.
struct phase_op_counters {
    uint64_t looked_up; // ids
    uint64_t missed;    // distinct experts copied
    uint64_t evicted;   // of those, slots that held another expert
    uint64_t runs;
};

struct phase_op_tensor {
    const uint8_t * src;    // the experts in host memory the device can read (pinned, unless staged); the CPU reads any memory
    uint8_t       * dst;    // fetch: slot 0 in the arena; stream: the ring region of this layer
    size_t          stride; // bytes of one expert, the same in src and dst
    size_t          pad;    // stream: bytes behind the last expert in dst that have to be zero (matmul kernels read past the end)
};

struct phase_fetch_op {
    uint32_t      magic = PHASE_OP_MAGIC;
    phase_op_kind kind  = PHASE_OP_FETCH;

    int32_t n_expert  = 0;
    int32_t n_slots   = 0;
    int32_t n_tensors = 0;

    phase_op_tensor     tensors[PHASE_MAX_TENSORS] = {};
    phase_op_counters * counters = nullptr;
};

constexpr int32_t PHASE_FILL_IDS = 256; // experts of one fill

// Experts for the empty slots of a layer, distinct, the most wanted first. Read during the call.
struct phase_fill {
    int32_t n      = 0; // at most PHASE_FILL_IDS
    int32_t newest = 0; // stamp of the first; each one behind it has one less
    int32_t experts[PHASE_FILL_IDS];

    phase_op_counters * counters = nullptr; // looked_up: experts in the list; missed: copied
};

// What a context's uploads to one device keep from one to the next.
struct phase_upload_side {
    // Owned by the backend's implementation: created by the first upload, freed by phase_backend_api.upload_free.
    void * backend_state = nullptr;
};

// The second stream of a context on one device.
struct phase_prefetch_side {
    // Owned by the backend's implementation: created by the first prefetch, freed by phase_backend_api.prefetch_free.
    void * backend_state = nullptr;
};

// The next layer's experts by its router, applied to this layer's activations. The ids it predicts are looked up as fetch does (those
// resident get the newest stamp).
struct phase_prefetch_op {
    uint32_t      magic = PHASE_OP_MAGIC;
    phase_op_kind kind  = PHASE_OP_PREFETCH;

    int32_t n_expert = 0;

    const float          * bias = nullptr; // [n_expert] in the memory of the router, added to the sigmoid of its scores; null: none
    const phase_fetch_op * next = nullptr; // experts, arena and slots; its counters are not used
    phase_prefetch_side  * side = nullptr; // of all layers of the device, which run one after the other

    phase_op_counters * counters = nullptr; // looked_up: predictions; missed: experts copied
};

// The ring of one device: n_regions byte regions, each as large as the largest layer. Layer number `position` (0 .. n_layers-1, in the
// order they run) uses region position % n_regions.
//
//   compute   ..| L0 |    L1    |    L2    |..
//   copy      L0 | L1 | L2   | L3 waits for L1's region when n_regions = 2
//
// A region is not overwritten before the layer in it finished; a layer does not start before its region arrived.
struct phase_stream_op;

// Written by the operator as copies and waits are seen to end, read by the host at any time.
struct phase_ring_times {
    uint64_t copy_us    = 0; // the copy engine was busy with layers; of staged ones, from the first chunk to the last
    uint64_t exposed_us = 0; // of that, the time in which the layers' own stream waited
};

struct phase_ring {
    int32_t            n_regions = 0;
    int32_t            n_layers  = 0;
    phase_stream_op ** layers    = nullptr; // [n_layers]

    phase_ring_times * times = nullptr; // may be null

    // Pinned memory through which layers that are `staged` go (see expert-staging.h); null when no layer is. Threads of the backend's
    // implementation fill it.
    uint8_t * staging       = nullptr;
    size_t    staging_bytes = 0;

    // Owned by the backend's implementation: created by the first stream op, freed by phase_backend_api.ring_free.
    void * backend_state = nullptr;

    // The micro-batch about to run is the prompt's last: layer 0 is not copied again behind the last layer. Set by the host between
    // graphs; false costs the copy of n_regions - 1 layers that ring_free then waits for.
    bool last_pass = false;
};

constexpr size_t PHASE_STAGING_CHUNK_BYTES = size_t(2) << 20; // large enough for the link's full speed
constexpr int    PHASE_STAGING_THREADS     = 8;               // a thread copies at 8 to 12 GB/s

struct phase_stream_op {
    uint32_t      magic = PHASE_OP_MAGIC;
    phase_op_kind kind  = PHASE_OP_STREAM;

    int32_t n_expert  = 0;
    int32_t n_tensors = 0;
    int32_t position  = 0;
    bool    staged    = false; // src is not pinned

    phase_ring        * ring = nullptr;
    phase_op_tensor     tensors[PHASE_MAX_TENSORS] = {}; // n_expert*stride bytes each
    phase_op_counters * counters = nullptr;              // missed: experts copied
};

// What a backend offers beside running the operators; found with ggml_backend_reg_get_proc_address(reg, "llama_phase_backend_api"),
// which returns a `const phase_backend_api * (*)()`. Absent: the CPU.
struct phase_backend_api {
    // Registers host memory so that every device of the backend can read it in place (mapped, read only). `ptr` and `size` are page
    // aligned. Returns null, or why not (valid until the next call).
    const char * (*pin)(void * ptr, size_t size);
    void         (*unpin)(void * ptr);

    // Queues on the backend instance, between graphs, what `list` wants of a layer: slots by the policy above, and the copies.
    void (*fill)(void * backend, const phase_fetch_op * op, void * state, const phase_fill * list);

    // Begins to copy the first n_regions layers, so that they arrive while the graph is planned. The ring's memory belongs to the
    // device of the backend instance. Returns null, or why not (valid until the next call on this thread); then the ring is to be freed.
    const char * (*ring_start)(void * backend, phase_ring * ring);

    // Waits for the copies in flight and frees the ring's backend_state. Called before the ring's memory is freed.
    void (*ring_free)(phase_ring * ring);

    // Frees the side's backend_state. Called between graphs, when none of this context runs again.
    void (*prefetch_free)(phase_prefetch_side * side);

    // Frees the memory pools of the backend instance (ggml_backend_t) that are not in use, and whatever was captured with their
    // addresses. Returns the bytes given back.
    size_t (*trim)(void * backend);

    // CUDA graphs launched since the process began
    uint64_t (*graph_replays)();

    // Pinned host memory that kernels of every device of the backend read and write at its host address. Returns null, or why not
    // (valid until the next call).
    const char * (*host_alloc)(size_t size, void ** ptr);
    void         (*host_free)(void * ptr);

    // Rows of a layer's K/V in host_alloc'ed memory that the device keeps as well (kv-op.h). Returns null, or why not (valid until the next
    // call on this thread). Freed before the host memory; reset before the host changes a row, which waits for what the
    // device still does with them.
    const char * (*kv_rows_new)(ggml_backend_device * dev, const phase_kv_rows_shape * shape, phase_kv_rows ** rows);
    void         (*kv_rows_free)(phase_kv_rows * rows);
    void         (*kv_rows_reset)(phase_kv_rows * rows);
    void         (*kv_rows_count)(const phase_kv_rows * rows, phase_kv_rows_counters * counters);

    // From now on, in all contexts: LLAMA_PHASE_SELECT.
    void (*set_select)(bool fast);

    // Queues on the backend instance the copies of at most PHASE_UPLOAD_PIECES pieces from memory of host_alloc. The pieces are read
    // during the call, their memory when the device gets there.
    void (*upload)(void * backend, phase_upload_side * side, const phase_upload_piece * pieces, int32_t n);
    void (*upload_free)(phase_upload_side * side); // when none of them runs any more
};

// words of a layer's state
constexpr size_t phase_state_words(size_t n_expert, size_t n_slots) {
    return 2*n_expert + 2*n_slots + 2 + 2*PHASE_MAX_IDS;
}
