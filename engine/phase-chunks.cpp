#include "phase-chunks.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static constexpr int64_t EXPERT_CHUNK   = 2048;     // tokens; fewer leave matrices too thin per expert
static constexpr int64_t MASK_CHUNK     = 2048;     // tokens, at most
static constexpr int64_t MASK_CHUNK_MIN = 256;      // tokens; fewer only cost launches
static constexpr int64_t MASK_CHUNKS    = 16;       // at most: planning a graph of twice the nodes takes twice as long
static constexpr int64_t MASK_ELEMENTS  = 1 << 25;  // of a chunk's mask: 64 MiB in F16, twice that while it is written out
static constexpr int64_t FILL_ELEMENTS  = 1 << 22;  // mask rows that are filled at a time, 8 MiB

static constexpr int64_t BLOCK      = 128;    // values of a Q1_0 block: | scale F16 | 128 bits |
static constexpr size_t  BLOCK_SIZE = 18;     // bytes
static constexpr float   SCALE      = 65504;  // the largest F16
static constexpr uint16_t SCALE_F16 = 0x7bff;

// Architectures that read the mask in their model file and do not know it as bits. Of these the experts alone are chunked.
static bool reads_mask(llm_arch arch) {
    return arch == LLM_ARCH_DEEPSEEK4 || arch == LLM_ARCH_GLM5_NEXT || arch == LLM_ARCH_MINIMAX_M3;
}

void phase_set_chunks(llama_cparams & cparams, const llama_model & model, int32_t setting) {
    cparams.phase_chunk       = setting;
    cparams.phase_chunk_masks = cparams.causal_attn && !model.hparams.use_alibi && !reads_mask(model.arch);
}

// chunks of nearly equal size, so that none has just a few rows
static int64_t even(int64_t n_tokens, int64_t most) {
    most = std::max(most, PHASE_CHUNK_TILE);
    if (n_tokens <= most) {
        return 0;
    }
    const int64_t n_chunks = (n_tokens + most - 1)/most;
    const int64_t tokens   = (n_tokens + n_chunks - 1)/n_chunks;
    return std::min(most, (tokens + PHASE_CHUNK_TILE - 1)/PHASE_CHUNK_TILE*PHASE_CHUNK_TILE);
}

int64_t phase_expert_chunk(const llama_cparams & cparams, int64_t n_tokens) {
    if (cparams.phase_chunk == 0) {
        return 0;
    }
    return even(n_tokens, cparams.phase_chunk > 0 ? cparams.phase_chunk : EXPERT_CHUNK);
}

static int64_t fewest_mask_tokens(int64_t n_tokens) {
    return std::max(MASK_CHUNK_MIN, n_tokens/MASK_CHUNKS);
}

int64_t phase_mask_chunk(const llama_cparams & cparams, int64_t n_kv, const llama_ubatch & ubatch) {
    const bool one_stream = cparams.kv_unified || ubatch.n_seqs_unq == 1;
    // whether attention is fused may be found out after phase_set_chunks
    if (cparams.phase_chunk == 0 || !cparams.phase_chunk_masks || !cparams.flash_attn || !one_stream || n_kv % BLOCK != 0) {
        return 0;
    }
    if (cparams.phase_chunk > 0) {
        return even(ubatch.n_tokens, cparams.phase_chunk);
    }
    int64_t most = MASK_CHUNK;
    while (most > fewest_mask_tokens(ubatch.n_tokens) && most*n_kv > MASK_ELEMENTS) {
        most /= 2;
    }
    return even(ubatch.n_tokens, most);
}

uint32_t phase_chunk_nodes(const llama_cparams & cparams, const llama_model & model, uint32_t n_tokens) {
    const auto count = [&](int64_t chunk) { return chunk ? (n_tokens + chunk - 1)/chunk : 0; };

    const int64_t experts = count(phase_expert_chunk(cparams, n_tokens));
    const int64_t masks   = cparams.phase_chunk_masks && cparams.phase_chunk ?
            count(even(n_tokens, cparams.phase_chunk > 0 ? cparams.phase_chunk : fewest_mask_tokens(n_tokens))) : 0;

    // a chunk of experts takes about 30 + 2*n_expert_used nodes, more with adapters; one of attention about 25, with a selection 70
    return (uint32_t) (model.hparams.n_layer_all*(experts*(64 + 4*model.hparams.n_expert_used()) + masks*96));
}

//
// masks
//

// a compact mask keeps the number of its cells, which its padded rows no longer tell, in op_params
static int32_t & n_cells(ggml_tensor * bits) {
    return bits->op_params[0];
}

bool phase_is_compact(const ggml_tensor * mask) {
    return mask && mask->type == GGML_TYPE_Q1_0;
}

ggml_tensor * phase_compact_mask(ggml_context * ctx, int64_t chunk, ggml_tensor * mask) {
    if (chunk == 0) {
        return mask;
    }
    GGML_ASSERT(mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && mask->ne[3] == 1);
    ggml_tensor * bits = ggml_new_tensor_2d(ctx, GGML_TYPE_Q1_0, (mask->ne[0] + BLOCK - 1)/BLOCK*BLOCK, mask->ne[1]);
    n_cells(bits) = (int32_t) mask->ne[0];
    ggml_set_input(bits);
    ggml_set_name(bits, "phase_mask_bits");
    return bits;
}

// the signs of 16 values, the first in the lowest bit
static uint16_t signs(const uint16_t * x) {
#ifdef __SSE2__ // 2 GiB of mask in a quarter of a second instead of one and a half
    const __m128i low  = _mm_loadu_si128((const __m128i *) x);
    const __m128i high = _mm_loadu_si128((const __m128i *) (x + 8));
    return (uint16_t) _mm_movemask_epi8(_mm_packs_epi16(low, high));
#else
    uint16_t bits = 0;
    for (int i = 0; i < 16; ++i) {
        bits |= (uint16_t) (x[i] >> 15 << i);
    }
    return bits;
#endif
}

// F16 0 and -inf differ in the sign
static void pack_row(const uint16_t * row, int64_t n, uint8_t * out, int64_t n_blocks) {
    for (int64_t b = 0; b < n_blocks; ++b, out += BLOCK_SIZE) {
        uint16_t words[BLOCK_SIZE/2] = { SCALE_F16 };
        const int64_t left = std::min(BLOCK, n - b*BLOCK);
        for (int64_t i = 0; i + 16 <= left; i += 16) {
            words[1 + i/16] = (uint16_t) ~signs(row + b*BLOCK + i);
        }
        for (int64_t i = left/16*16; i < left; ++i) {
            words[1 + i/16] |= (uint16_t) ((row[b*BLOCK + i] >> 15 ^ 1) << i % 16);
        }
        std::memcpy(out, words, BLOCK_SIZE); // little endian, as all of GGUF
    }
}

namespace {

// F16 rows in host memory
struct host_rows {
    host_rows(int64_t n, int64_t count) : ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true })) {
        tensor = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, n, count);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        if (!buffer) {
            throw std::runtime_error("no host memory to fill a mask");
        }
    }

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           tensor;
};

} // namespace

static void pack(const ggml_tensor * rows, ggml_tensor * bits, int64_t first, int64_t count) {
    GGML_ASSERT(ggml_backend_buffer_is_host(bits->buffer));
    for (int64_t i = 0; i < count; ++i) {
        pack_row((const uint16_t *) ((const char *) rows->data + i*rows->nb[1]), rows->ne[0],
                (uint8_t *) bits->data + (first + i)*bits->nb[1], bits->ne[0]/BLOCK);
    }
}

void phase_fill_mask(ggml_tensor * mask, const std::function<void(ggml_tensor * rows)> & fill) {
    if (!phase_is_compact(mask)) {
        fill(mask);
        return;
    }
    host_rows rows(n_cells(mask), mask->ne[1]);
    fill(rows.tensor);
    pack(rows.tensor, mask, 0, mask->ne[1]);
}

void phase_fill_mask(ggml_tensor * mask, const llama_ubatch & ubatch,
        const std::function<void(ggml_tensor * rows, const llama_ubatch * part)> & fill) {
    if (!phase_is_compact(mask)) {
        fill(mask, &ubatch);
        return;
    }
    const int64_t n_tokens = ubatch.n_tokens;
    const int64_t step     = std::min<int64_t>(n_tokens, std::max<int64_t>(64, FILL_ELEMENTS/mask->ne[0]));

    host_rows rows(n_cells(mask), step);
    std::vector<llama_pos> pos(step*ubatch.n_pos);
    for (int64_t first = 0; first < n_tokens; first += step) {
        const int64_t count = std::min(step, n_tokens - first);
        for (uint32_t p = 0; p < ubatch.n_pos; ++p) { // a section per position
            std::copy_n(ubatch.pos + p*n_tokens + first, count, pos.begin() + p*count);
        }
        // what a mask depends on; the sequences of a part need not be all of the micro-batch's
        llama_ubatch part = ubatch;
        part.n_tokens     = (uint32_t) count;
        part.pos          = pos.data();
        part.n_seq_id     = ubatch.n_seq_id + first;
        part.seq_id       = ubatch.seq_id + first;
        rows.tensor->ne[1] = count;
        rows.tensor->nb[2] = rows.tensor->nb[3] = rows.tensor->nb[1]*count;
        fill(rows.tensor, &part);
        pack(rows.tensor, mask, first, count);
    }
}

static ggml_tensor * write_out(ggml_context * ctx, ggml_tensor * bits, int64_t first, int64_t count) {
    ggml_tensor * ids = ggml_cast(ctx, ggml_arange(ctx, (float) first, (float) (first + count), 1.0f), GGML_TYPE_I32);
    ggml_tensor * x   = ggml_scale_bias(ctx, ggml_get_rows(ctx, bits, ids), 1.0f, -SCALE);
    if (x->ne[0] != n_cells(bits)) {
        x = ggml_view_2d(ctx, x, n_cells(bits), count, x->nb[1], 0);
    }
    return ggml_cast(ctx, x, GGML_TYPE_F16);
}

//
// building
//

ggml_tensor * phase_chunk_rows(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * tensor, int64_t first, int64_t count) {
    if (phase_is_compact(tensor)) {
        ggml_tensor * rows = write_out(ctx, tensor, first, count);
        ggml_build_forward_expand(gf, rows);
        return rows;
    }
    const int dim = ggml_n_dims(tensor) - 1;
    GGML_ASSERT(dim > 0 && first + count <= tensor->ne[dim]);
    int64_t ne[GGML_MAX_DIMS];
    std::copy_n(tensor->ne, GGML_MAX_DIMS, ne);
    ne[dim] = count;
    return ggml_view_4d(ctx, tensor, ne[0], ne[1], ne[2], ne[3], tensor->nb[1], tensor->nb[2], tensor->nb[3], first*tensor->nb[dim]);
}

ggml_tensor * phase_chunk_store(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * out, ggml_tensor * rows, int64_t first, int64_t n_tokens) {
    GGML_ASSERT(rows->type == GGML_TYPE_F32 && ggml_is_contiguous(rows) && rows->ne[2] == 1 && rows->ne[3] == 1);
    ggml_build_forward_expand(gf, rows);
    if (!out) {
        // A node of the graph, since a leaf would be alive from the graph's start on. Its values are all overwritten.
        out = ggml_repeat_4d(ctx, ggml_view_2d(ctx, rows, rows->ne[0], 1, rows->nb[1], 0), rows->ne[0], n_tokens, 1, 1);
    }
    out = ggml_set_2d_inplace(ctx, out, rows, out->nb[1], first*out->nb[1]);
    ggml_build_forward_expand(gf, out);
    return out;
}

phase_selection phase_select_in_chunks(int64_t chunk, const phase_selection & select) {
    if (chunk) {
        return select;
    }
    ggml_tensor * mask = select(nullptr, [](ggml_tensor * mask, ggml_tensor *) { return mask; });
    return [mask](ggml_tensor * q, const phase_attend & attend) { return attend(mask, q); };
}
