// Where a micro-batch in chunks, or another micro-batch, begins to give other values, and why.
//
//   first_difference MODEL N_TOKENS UBATCH CHUNK[,CHUNK..] [noise=NAME:EPSILON | corrupt=NAME:ROW]...
//
// One prompt is computed by stock at UBATCH (the reference), by stock at half and a quarter of it, and in the prefill phase at
// UBATCH in chunks of CHUNK tokens. Tensors are compared by name, token by token, in the order of the reference's graph. Each
// variant runs four times:
//
//   plain    no callback: |difference| of the log-probability of the reference's first choice, at every token
//   free     the first tensors that differ; selected ids that differ, and whether the scores' own differences explain each of them:
//            an id that left and one that came are a near tie when their distance is at most the sum of their differences
//   forced   every tensor is overwritten by the reference's once it was compared, so that each shows its own error alone.
//            An offset, a mask row or a seam of chunks is large here, and scores that are equal have to select equal ids
//   pinned   selected ids only are overwritten: what is left of the difference when nothing is chosen otherwise
//
// A chunked variant fails when a token's own error in a tensor exceeds ERROR_LIMIT and three times that of the stock variants, when ids differ
// though scores do not, or when a change of ids is no near tie. noise and corrupt (of one token) change tensors of the
// chunked variants, to try the program itself. Built and run by tools/first_difference.py.
//
// Exit codes: 0 explained, 1 the model does not load or cannot be computed, 2 wrong usage, 4 not explained.

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

static constexpr double ERROR_LIMIT = 1e-2; // of a token, by the rms of all; sums in F16 and products in TF32 show about 1e-3
static constexpr double TIE_SLACK   = 1e-7; // of a score

using row  = std::vector<float>; // -inf stays -inf, ids are below 2^24
using rows = std::vector<row>;   // by token

struct change {
    bool        corrupt = false;
    std::string name;
    double      value   = 0; // epsilon, or the row
};

struct variant {
    std::string name;
    int32_t     ubatch;
    int32_t     chunk; // 0: stock
};

enum class mode { record, plain, free, forced, pinned };

struct difference {
    double  relative = 0; // rms of the differences by the reference's rms, or 1 when only one of two values is -inf
    double  of_row   = 0; // the same with the differences of the worst token alone
    double  error    = 0; // sums of squares, until the variant is through
    double  worst    = 0;
    double  square   = 0;
    int64_t n_rows   = 0;
    int64_t first    = -1;
};

struct result {
    std::map<std::string, difference> tensors;
    std::map<std::string, rows>       scores;
    int64_t selections = 0, changed = 0, not_tied = 0;
    double  widest_gap = 0;
    std::string first_change;
    std::vector<double> log_probabilities; // |difference| by token
};

struct probe {
    std::vector<std::string>    order;
    std::map<std::string, rows> reference;
    std::set<std::string>       skipped; // not by token, or more than one tensor of a name
    std::set<std::string>       in_batch;
    std::map<std::string, int64_t> cursor;
    std::vector<change> changes;
    std::mt19937 random{ 1 };
    mode    what     = mode::record;
    bool    chunked  = false;
    int64_t n_tokens = 0, batch = 0;
    std::string layer; // of the tensors around, as the end of a name
    result  out;
};

static std::string base(const std::string & name) {
    return name.substr(0, name.rfind('-'));
}

static bool is_selection(const std::string & name) {
    return base(name) == "ffn_moe_topk" || base(name) == "indexer_top_k";
}

static std::string scores_of(const std::string & name) {
    return (base(name) == "ffn_moe_topk" ? "ffn_moe_probs" : "indexer_score") + name.substr(name.rfind('-'));
}

static bool is_scores(const std::string & name) {
    return base(name) == "ffn_moe_probs" || base(name) == "indexer_score";
}

static bool is_wanted(const ggml_tensor * t, const std::string & name) {
    if (name.empty() || name.find(' ') != std::string::npos || name.rfind("node_", 0) == 0 || name.rfind("leaf_", 0) == 0 ||
            (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_I32) || ggml_nelements(t) == 0) {
        return false;
    }
    switch (t->op) {
        case GGML_OP_VIEW:
            return is_selection(name); // of a sort
        case GGML_OP_NONE: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
        case GGML_OP_SET: // a chunk's rows on their way into the whole: compared as the chunk's
            return false;
        default:
            return t->type != GGML_TYPE_I32 || is_selection(name);
    }
}

// Tensors whose last dimension is tokens, as rows.
struct view {
    explicit view(ggml_tensor * t) : tensor(t), bytes(ggml_nbytes(t)) {
        ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
        dim = ggml_n_dims(t) - 1;
    }
    int64_t count() const { return tensor->ne[dim]; }

    template <typename F> void each(int64_t token, const F & visit) { // visit(bytes of a value)
        const int64_t n2 = dim > 2 ? tensor->ne[2] : 1, n1 = dim > 1 ? tensor->ne[1] : 1;
        for (int64_t i2 = 0; i2 < n2; ++i2) {
            for (int64_t i1 = 0; i1 < n1; ++i1) {
                char * line = (char *) bytes.data() + token*tensor->nb[dim] + i2*tensor->nb[2]*(dim > 2) + i1*tensor->nb[1]*(dim > 1);
                for (int64_t i0 = 0; i0 < tensor->ne[0]; ++i0) {
                    visit(line + i0*tensor->nb[0]);
                }
            }
        }
    }
    row get(int64_t token) {
        row out;
        if (tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor)) {
            const float * values = (const float *) (bytes.data() + token*tensor->nb[dim]);
            out.assign(values, values + tensor->nb[dim]/sizeof(float));
            return out;
        }
        each(token, [&](const char * value) {
            out.push_back(tensor->type == GGML_TYPE_F32 ? *(const float *) value :
                    tensor->type == GGML_TYPE_I32 ? (float) *(const int32_t *) value : ggml_fp16_to_fp32(*(const ggml_fp16_t *) value));
        });
        return out;
    }
    void set(int64_t token, const row & values) {
        size_t i = 0;
        each(token, [&](char * value) {
            const float x = values[i++];
            switch (tensor->type) {
                case GGML_TYPE_F32: std::memcpy(value, &x, sizeof(x)); break;
                case GGML_TYPE_I32: *(int32_t *) value = (int32_t) x; break;
                default:            *(ggml_fp16_t *) value = ggml_fp32_to_fp16(x);
            }
        });
    }
    void write() { ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size()); }

    ggml_tensor * tensor;
    std::vector<uint8_t> bytes;
    int dim;
};

static void compare_selection(probe & p, const std::string & name, int64_t token, const row & a, const row & b) {
    ++p.out.selections;
    const std::set<float> was(a.begin(), a.end()), is(b.begin(), b.end());
    if (was == is) {
        return;
    }
    const row & x = p.reference.at(scores_of(name))[token];
    const row & y = p.out.scores.at(scores_of(name))[token];
    // the least of those that left against the most of those that came
    const auto score = [](const row & of, float id) { return (double) of[(size_t) id]; };
    const auto apart = [](double one, double other) { return one == other ? 0 : std::fabs(one - other); }; // both may be -inf
    double gap = -INFINITY, moved = 0;
    for (const float left : was) {
        for (const float came : is) {
            if (is.count(left) || was.count(came) || score(x, left) == score(x, came)) {
                continue;
            }
            const double distance = score(x, left) - score(x, came);
            const double allowed  = apart(score(x, left), score(y, left)) + apart(score(x, came), score(y, came));
            if (distance - allowed > gap - moved) {
                gap = distance, moved = allowed;
            }
        }
    }
    if (gap == -INFINITY) {
        return; // equal scores
    }
    ++p.out.changed;
    p.out.widest_gap = std::max(p.out.widest_gap, gap);
    // a distance of infinity: something invisible was chosen
    if (!(gap <= moved + TIE_SLACK*(1 + std::fabs(score(x, *was.begin()))))) {
        ++p.out.not_tied;
    }
    if (p.out.first_change.empty()) {
        char text[200];
        snprintf(text, sizeof(text), "%s, token %lld: scores %.3g apart, which differ by %.3g", name.c_str(), (long long) token, gap, moved);
        p.out.first_change = text;
    }
}

static void compare(probe & p, const std::string & name, int64_t token, const row & a, const row & b) {
    double error = 0, square = 0;
    bool   infinite = false;
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) { // what another split has no cells for is invisible
        const double x = i < a.size() ? a[i] : -INFINITY, y = i < b.size() ? b[i] : -INFINITY;
        if (std::isinf(x) || std::isinf(y)) {
            infinite = infinite || x != y;
            continue;
        }
        error  += (x - y)*(x - y);
        square += x*x;
    }
    auto & d = p.out.tensors[name];
    if (error > 0 || infinite || std::isnan(error)) {
        ++d.n_rows;
        if (d.first < 0) {
            d.first = token;
        }
    }
    error     = infinite ? INFINITY : error;
    d.error  += error;
    d.worst   = std::max(d.worst, error);
    d.square += square;
}

static void disturb(probe & p, const std::string & name, int64_t first, view & v) {
    for (const auto & c : p.changes) {
        if (base(name) != c.name) {
            continue;
        }
        for (int64_t i = 0; i < v.count(); ++i) {
            row values = v.get(i);
            if (c.corrupt && first + i == (int64_t) c.value) {
                values = v.get(i > 0 ? i - 1 : i + 1);
            }
            if (!c.corrupt) {
                std::uniform_real_distribution<double> one(-1, 1);
                for (auto & x : values) {
                    x = (float) (x*(1 + c.value*one(p.random)));
                }
            }
            v.set(i, values);
        }
        v.write();
    }
}

static bool on_tensor(ggml_tensor * t, bool ask, void * data) {
    auto & p = *(probe *) data;
    std::string name = t->name;
    if (t->op == GGML_OP_FLASH_ATTN_EXT) { // has no name, but its layer's other tensors have
        name = "flash_attn" + p.layer;
    } else if (name.find_last_not_of("0123456789") == name.rfind('-')) {
        p.layer = name.substr(std::min(name.size(), name.rfind('-')));
    }
    if (!is_wanted(t, name)) {
        return !ask;
    }
    const bool recording = p.what == mode::record;
    if (p.skipped.count(name) || (!recording && !p.reference.count(name))) {
        return !ask;
    }
    if (ask) {
        return true;
    }
    const int64_t first = p.cursor[name];
    const int64_t count = t->ne[ggml_n_dims(t) - 1];
    if (recording && (count != p.batch || !p.in_batch.insert(name).second)) {
        p.skipped.insert(name);
        p.reference.erase(name);
        return true;
    }
    if (first + count > p.n_tokens) {
        return true;
    }
    p.cursor[name] += count;
    view v(t);
    if (recording) {
        if (!p.reference.count(name)) {
            p.order.push_back(name);
        }
        for (int64_t i = 0; i < count; ++i) {
            p.reference[name].push_back(v.get(i));
        }
        return true;
    }
    if (p.chunked) {
        disturb(p, name, first, v);
    }
    const auto & expected = p.reference.at(name);
    bool         written  = false;
    for (int64_t i = 0; i < count; ++i) {
        row got = v.get(i);
        const row & want = expected[first + i];
        if (is_selection(name)) {
            compare_selection(p, name, first + i, want, got);
        } else {
            compare(p, name, first + i, want, got);
        }
        const bool overwrite = p.what == mode::forced || (p.what == mode::pinned && is_selection(name));
        if (is_scores(name)) {
            p.out.scores[name].push_back(p.what == mode::forced ? want : got);
        }
        if (overwrite && want.size() == got.size()) {
            v.set(i, want);
            written = true;
        }
    }
    if (written) {
        v.write();
    }
    return true;
}

static std::vector<std::vector<float>> logits_of(llama_model * model, const variant & of, probe & p, const std::vector<llama_token> & tokens) {
    const bool phase = of.chunk != 0;
    setenv("LLAMA_PHASE_PREFILL_MODE", phase ? "transaction" : "off", 1);
    setenv("LLAMA_PHASE_PREFILL_UBATCH", std::to_string(of.ubatch).c_str(), 1);
    setenv("LLAMA_PHASE_PREFILL_MIN_TOKENS", "64", 1);
    setenv("LLAMA_PHASE_CHUNK", phase ? std::to_string(of.chunk).c_str() : "", 1);

    auto params     = llama_context_default_params();
    params.n_ctx    = (uint32_t) (tokens.size() + 64);
    params.n_batch  = (uint32_t) of.ubatch;
    params.n_ubatch = (uint32_t) (phase ? of.ubatch/8 : of.ubatch);
    params.n_seq_max       = 1;
    params.n_threads       = params.n_threads_batch = 2;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (p.what != mode::plain) {
        params.cb_eval           = on_tensor;
        params.cb_eval_user_data = &p;
    }
    auto * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fprintf(stderr, "first_difference: no context for %s\n", of.name.c_str());
        exit(1);
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    p.cursor.clear();
    p.out      = {};
    p.chunked  = phase;
    p.n_tokens = (int64_t) tokens.size();
    std::vector<std::vector<float>> out;
    // the reference's batches, so that only the variants at another micro-batch split otherwise
    for (size_t first = 0; first < tokens.size(); first += of.ubatch) {
        const size_t count = std::min(tokens.size() - first, (size_t) of.ubatch);
        p.batch = (int64_t) count;
        p.in_batch.clear();
        auto batch = llama_batch_init((int32_t) count, 0, 1);
        for (size_t i = 0; i < count; ++i) {
            batch.token[i]     = tokens[first + i];
            batch.pos[i]       = (llama_pos) (first + i);
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = 1;
        }
        batch.n_tokens = (int32_t) count;
        if (llama_decode(ctx, batch) != 0) {
            fprintf(stderr, "first_difference: %s cannot be computed\n", of.name.c_str());
            exit(1);
        }
        for (size_t i = 0; i < count; ++i) {
            const float * of_token = llama_get_logits_ith(ctx, (int32_t) i);
            out.emplace_back(of_token, of_token + n_vocab);
        }
        llama_batch_free(batch);
    }
    llama_free(ctx);
    for (auto & [name, d] : p.out.tensors) {
        const auto by = [&](double error) { return error == 0 ? 0 : std::isfinite(error) ? std::sqrt(error/std::max(d.square, 1e-30)) : 1; };
        d.relative = by(d.error);
        d.of_row   = by(d.worst*tokens.size());
    }
    return out;
}

static double log_probability(const std::vector<float> & logits, size_t id) {
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float x : logits) {
        sum += std::exp(x - most);
    }
    return logits[id] - most - std::log(sum);
}

static std::vector<double> distances(const std::vector<std::vector<float>> & a, const std::vector<std::vector<float>> & b) {
    std::vector<double> out;
    for (size_t i = 0; i < a.size(); ++i) {
        const size_t id = std::max_element(a[i].begin(), a[i].end()) - a[i].begin();
        out.push_back(std::fabs(log_probability(a[i], id) - log_probability(b[i], id)));
    }
    return out;
}

static std::string quantiles(std::vector<double> x) {
    const double last = x.back();
    std::sort(x.begin(), x.end());
    char text[160];
    snprintf(text, sizeof(text), "last %.5f median %.5f 99 %% %.5f most %.5f", last, x[x.size()/2], x[x.size()*99/100], x.back());
    return text;
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: first_difference MODEL N_TOKENS UBATCH CHUNK[,CHUNK..] [noise=NAME:EPSILON | corrupt=NAME:ROW]...\n");
        return 2;
    }
    probe p;
    for (int i = 5; i < argc; ++i) {
        const std::string text = argv[i];
        const size_t equals = text.find('='), colon = text.rfind(':');
        if (equals == std::string::npos || colon == std::string::npos || colon < equals) {
            fprintf(stderr, "first_difference: %s is not noise=NAME:EPSILON or corrupt=NAME:ROW\n", argv[i]);
            return 2;
        }
        p.changes.push_back({ text[0] == 'c', text.substr(equals + 1, colon - equals - 1), std::atof(text.c_str() + colon + 1) });
    }
    llama_backend_init();
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level == GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); } }, nullptr);
    auto params = llama_model_default_params();
    params.n_gpu_layers = 999;
    auto * model = llama_model_load_from_file(argv[1], params);
    if (!model) {
        return 1;
    }
    const int32_t n_tokens = std::atoi(argv[2]), ubatch = std::atoi(argv[3]);
    const int32_t n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::mt19937 random(7);
    std::vector<llama_token> tokens;
    for (int32_t i = 0; i < n_tokens; ++i) {
        tokens.push_back((llama_token) (random() % std::min(n_vocab, 4000)));
    }

    std::vector<variant> variants { { "stock, half", ubatch/2, 0 }, { "stock, quarter", ubatch/4, 0 } };
    std::stringstream chunks(argv[4]);
    for (std::string part; std::getline(chunks, part, ',');) {
        variants.push_back({ "chunks of " + part, ubatch, std::atoi(part.c_str()) });
    }
    const variant stock { "stock", ubatch, 0 };

    p.what = mode::plain;
    const auto plain = logits_of(model, stock, p, tokens);
    p.what = mode::record;
    const auto recorded = logits_of(model, stock, p, tokens);
    p.order.erase(std::remove_if(p.order.begin(), p.order.end(), [&](const std::string & name) { return p.skipped.count(name) != 0; }), p.order.end());
    printf("%d tokens, micro-batch %d; %zu tensors compared, not those of", n_tokens, ubatch, p.order.size());
    std::set<std::string> bases;
    for (const auto & name : p.skipped) {
        bases.insert(base(name));
    }
    for (const auto & name : bases) {
        printf(" %s", name.c_str());
    }
    printf("\nreference with and without callback: %s\n", quantiles(distances(plain, recorded)).c_str());

    std::map<std::string, double> stock_error; // by tensor without layer
    bool explained = true;
    for (const auto & v : variants) {
        printf("\n%s\n", v.name.c_str());
        p.what = mode::plain;
        const auto without = logits_of(model, v, p, tokens);
        printf("  plain   %s\n", quantiles(distances(plain, without)).c_str());

        p.what = mode::free;
        const auto free_logits = logits_of(model, v, p, tokens);
        printf("  free    %s\n", quantiles(distances(recorded, free_logits)).c_str());
        int shown = 0;
        for (const auto & name : p.order) {
            const auto & d = p.out.tensors[name];
            if (d.n_rows > 0 && shown++ < 8) {
                printf("          %-28s relative %.2e, %lld tokens from %lld on\n", name.c_str(), d.relative, (long long) d.n_rows, (long long) d.first);
            }
        }
        printf("          selections changed: %lld of %lld, no near tie: %lld, widest gap %.3g; %s\n", (long long) p.out.changed,
                (long long) p.out.selections, (long long) p.out.not_tied, p.out.widest_gap, p.out.first_change.c_str());
        const bool tied = p.out.not_tied == 0;

        p.what = mode::forced;
        const auto forced = logits_of(model, v, p, tokens);
        std::map<std::string, std::pair<double, std::string>> own; // by tensor without layer, the worst
        for (const auto & name : p.order) {
            auto & worst = own[base(name)];
            if (p.out.tensors[name].of_row > worst.first) {
                worst = { p.out.tensors[name].of_row, name };
            }
        }
        std::vector<std::pair<double, std::string>> sorted;
        for (const auto & [name, worst] : own) {
            sorted.push_back(worst);
        }
        std::sort(sorted.rbegin(), sorted.rend());
        printf("  forced  %s; own errors, of all tokens and of the worst:\n", quantiles(distances(recorded, forced)).c_str());
        for (size_t i = 0; i < sorted.size() && i < 10 && sorted[i].first > 0; ++i) {
            printf("          %-28s %.2e %.2e\n", sorted[i].second.c_str(), p.out.tensors[sorted[i].second].relative, sorted[i].first);
        }
        printf("          of equal scores other ids: %lld\n", (long long) p.out.changed);
        const bool chosen_alike = p.out.changed == 0;

        p.what = mode::pinned;
        const auto pinned = logits_of(model, v, p, tokens);
        printf("  pinned  %s\n", quantiles(distances(recorded, pinned)).c_str());

        for (const auto & [name, worst] : own) {
            if (v.chunk == 0) {
                stock_error[name] = std::max(stock_error[name], worst.first);
            } else if (worst.first > std::max(ERROR_LIMIT, 3*stock_error[name])) {
                printf("  NOT EXPLAINED: %s is %.2e away by itself, in stock %.2e\n", worst.second.c_str(), worst.first, stock_error[name]);
                explained = false;
            }
        }
        if (v.chunk != 0 && (!tied || !chosen_alike)) {
            printf("  NOT EXPLAINED: %s\n", tied ? "other ids of equal scores" : "a change of selected ids that is no near tie");
            explained = false;
        }
    }
    printf("\n%s\n", explained ? "explained: own errors are roundings, changes of ids are near ties" : "NOT EXPLAINED");
    llama_model_free(model);
    llama_backend_free();
    return explained ? 0 : 4;
}
