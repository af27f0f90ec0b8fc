// Compute buffers of a model by micro-batch and context, planned without allocating, and what is alive at their peak.
//
//   compute_buffers MODEL UBATCH[,UBATCH..] N_CTX[,N_CTX..] [TOP]
//
// One line per pair, with the time that building and planning took; with TOP also the TOP largest tensors alive at the peak. The environment is the engine's: with
// LLAMA_PHASE_PREFILL_MODE=transaction and LLAMA_PHASE_CHUNK the graph is that of the prefill phase.
// The peak is that of lifetimes and in-place reuse as in ggml-alloc.c, without fragmentation; `planned` is ggml-alloc's own.
// Built and run by tools/compute_buffers.py. Exit codes: 0 done, 1 the model does not load, 2 wrong usage.

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-memory.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static std::vector<uint32_t> numbers(const char * text) {
    std::vector<uint32_t> out;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        out.push_back((uint32_t) std::atoi(part.c_str()));
    }
    return out;
}

static const ggml_tensor * owner(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// nodes that ggml-alloc lets write into a source of the same layout
static bool in_place(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_FILL: case GGML_OP_SCALE: case GGML_OP_ADD: case GGML_OP_ADD_ID: case GGML_OP_SUB: case GGML_OP_MUL:
        case GGML_OP_DIV: case GGML_OP_SQR: case GGML_OP_SQRT: case GGML_OP_LOG: case GGML_OP_UNARY: case GGML_OP_ROPE:
        case GGML_OP_RMS_NORM: case GGML_OP_CLAMP: case GGML_OP_SOFT_MAX:
            return true;
        default:
            return false;
    }
}

struct peak {
    size_t                           bytes = 0;
    const ggml_tensor *              node  = nullptr;
    std::vector<const ggml_tensor *> alive;
};

static peak find_peak(ggml_cgraph * gf) {
    const int n = ggml_graph_n_nodes(gf);
    std::map<const ggml_tensor *, int> last; // by owner, the last node that touches it
    for (int i = 0; i < n; ++i) {
        const auto * node = ggml_graph_node(gf, i);
        last[owner(node)] = (node->flags & GGML_TENSOR_FLAG_OUTPUT) ? n : std::max(last[owner(node)], i);
        for (const auto * src : node->src) {
            if (src && !(owner(src)->flags & GGML_TENSOR_FLAG_OUTPUT)) {
                last[owner(src)] = i;
            }
        }
    }
    std::map<const ggml_tensor *, size_t> alive;
    size_t bytes = 0;
    const auto add = [&](const ggml_tensor * t) {
        if (!t->buffer && alive.emplace(t, ggml_nbytes(t)).second) {
            bytes += ggml_nbytes(t);
        }
    };
    const auto drop = [&](const ggml_tensor * t) {
        if (const auto it = alive.find(t); it != alive.end()) {
            bytes -= it->second;
            alive.erase(it);
        }
    };
    for (int i = 0; i < n; ++i) { // inputs live from the start
        for (const auto * src : ggml_graph_node(gf, i)->src) {
            if (src && owner(src)->op == GGML_OP_NONE) {
                add(owner(src));
            }
        }
    }
    peak out;
    for (int i = 0; i < n; ++i) {
        const auto * node = ggml_graph_node(gf, i);
        if (!node->view_src) {
            for (const auto * src : node->src) {
                if (src && in_place(node) && !src->view_src && last[src] == i && alive.count(src) && ggml_are_same_shape(src, node) &&
                        src->type == node->type && !(src->flags & GGML_TENSOR_FLAG_OUTPUT)) {
                    drop(src);
                    break;
                }
            }
            add(node);
        }
        if (bytes > out.bytes) {
            out = { bytes, node, {} };
            for (const auto & entry : alive) {
                out.alive.push_back(entry.first);
            }
        }
        for (const auto * src : node->src) {
            if (src && last[owner(src)] == i) {
                drop(owner(src));
            }
        }
        if (last[owner(node)] == i) {
            drop(owner(node));
        }
    }
    return out;
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: compute_buffers MODEL UBATCH[,..] N_CTX[,..] [TOP]\n");
        return 2;
    }
    const size_t top = argc > 4 ? (size_t) std::atoi(argv[4]) : 0;
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();

    auto mparams = llama_model_default_params();
    mparams.no_alloc = true;
    mparams.load_mode    = LLAMA_LOAD_MODE_NONE;
    mparams.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (!model) {
        return 1;
    }
    const double MiB = 1024.0*1024.0;
    for (const uint32_t n_ctx : numbers(argv[3])) {
        for (const uint32_t n_ubatch : numbers(argv[2])) {
            auto cparams = llama_context_default_params();
            cparams.n_ctx           = n_ctx;
            cparams.n_batch         = n_ubatch;
            cparams.n_ubatch        = n_ubatch;
            cparams.n_seq_max       = 1;
            cparams.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
            llama_context * ctx = llama_init_from_model(model, cparams);
            if (!ctx) {
                return 1;
            }
            const auto mctx = llama_get_memory(ctx)->init_full();
            size_t planned[8] = {};
            const int64_t start_us = ggml_time_us();
            auto * gf = ctx->graph_reserve(n_ubatch, 1, 1, mctx.get(), true, planned);
            const int64_t took_us = ggml_time_us() - start_us;
            const auto at = find_peak(gf);
            std::printf("ubatch %5u ctx %6u planned %7.0f MiB in %3.0f ms, peak %7.0f MiB at %s, %d nodes\n", n_ubatch, n_ctx, planned[0]/MiB,
                    took_us/1e3, at.bytes/MiB, at.node->name, ggml_graph_n_nodes(gf));
            auto alive = at.alive;
            std::sort(alive.begin(), alive.end(), [](auto * a, auto * b) { return ggml_nbytes(a) > ggml_nbytes(b); });
            for (size_t i = 0; i < std::min(top, alive.size()); ++i) {
                const auto * t = alive[i];
                std::printf("  %8.1f MiB %-4s [%ld, %ld, %ld, %ld] %s %s\n", ggml_nbytes(t)/MiB, ggml_type_name(t->type), (long) t->ne[0], (long) t->ne[1],
                        (long) t->ne[2], (long) t->ne[3], ggml_op_name(t->op), t->name);
            }
            std::fflush(stdout);
            llama_free(ctx);
        }
    }
    llama_model_free(model);
    return 0;
}
