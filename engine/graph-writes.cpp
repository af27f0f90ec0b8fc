#include "graph-writes.h"

#include "ggml-impl.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <vector>

// the tensor that owns the memory
static const ggml_tensor * owner_of(const ggml_tensor * tensor) {
    while (tensor->view_src) {
        tensor = tensor->view_src;
    }
    return tensor;
}

static bool only_looks(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

// From the last node to the first: what is needed by then is needed by a node behind. A node that writes through a view of a tensor
// counts as part of that tensor.
int phase_keep_writes(ggml_context * ctx, ggml_cgraph * graph) {
    std::unordered_set<const ggml_tensor *> needed;
    std::unordered_set<const ggml_tensor *> kept;

    for (int i = graph->n_nodes - 1; i >= 0; --i) {
        const auto * node   = graph->nodes[i];
        const auto * owner  = owner_of(node);
        const bool   writes = node->view_src && !only_looks(node->op);
        if (!(writes && (owner->buffer || needed.count(owner))) && !needed.count(node) && !(node->flags & GGML_TENSOR_FLAG_INPUT)) {
            continue;
        }
        kept.insert(node);
        needed.insert(owner);
        for (const auto * src : node->src) {
            if (src) {
                needed.insert(src);
                needed.insert(owner_of(src));
            }
        }
    }

    // The allocator takes a plan it has for a graph when the nodes and their sources fit; an input that is nobody's source would not be
    // looked at, and the mask grows with the context. So each gets a view, which computes nothing.
    std::vector<ggml_tensor *> nodes;
    int n_leafs = 0;
    for (int i = 0; i < graph->n_leafs; ++i) {
        auto * leaf = graph->leafs[i];
        const bool used = needed.count(leaf) > 0;
        if (!used && !(leaf->flags & GGML_TENSOR_FLAG_INPUT)) {
            continue;
        }
        if (!used && !ggml_is_empty(leaf)) {
            nodes.push_back(ggml_view_1d(ctx, leaf, 1, 0));
        }
        graph->leafs[n_leafs++] = leaf;
    }
    std::copy_if(graph->nodes, graph->nodes + graph->n_nodes, std::back_inserter(nodes), [&](const ggml_tensor * node) { return kept.count(node) > 0; });

    const int n_dropped = graph->n_nodes - (int) nodes.size();
    GGML_ASSERT(n_dropped >= 0);
    std::copy(nodes.begin(), nodes.end(), graph->nodes);
    graph->n_nodes = (int) nodes.size();
    graph->n_leafs = n_leafs;
    return n_dropped;
}
