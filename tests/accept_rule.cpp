// Draws from a model at a fixed context through llama.cpp's rules that verify a draft, for test_accept_rule.py:
//
//   accept_rule MODEL RULE DRAWS SEED TEMPERATURE TOP_K TOP_P
//
// RULE  match      draft of one token, accepted when the target samples it (greedy drafts)
//       rejection  draft sampled from a distribution of its own, accepted with min(1, p/q), else drawn from the rest
//       always, again    biased, to show that the test fails: every draft is accepted; a rejected draft is followed by a draw from
//                        the target's whole distribution
//
// Prints JSON: "expected" and "drawn" are probabilities and counts by token for the drafted position, "expected_next" and
// "drawn_next" those for the position after one given draft, when it was accepted.

#include "common.h"
#include "sampling.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

using distribution = std::vector<llama_token_data>;

static distribution target_at(common_sampler * sampler, llama_context * ctx, int idx) {
    common_sampler_sample(sampler, ctx, idx);
    const auto * candidates = common_sampler_get_candidates(sampler, true);
    return distribution(candidates->data, candidates->data + candidates->size);
}

static void print(const char * name, const std::map<llama_token, double> & values, const char * end) {
    std::printf("\"%s\": {", name);
    const char * separator = "";
    for (const auto & [token, value] : values) {
        std::printf("%s\"%d\": %.9g", separator, token, value);
        separator = ", ";
    }
    std::printf("}%s", end);
}

static std::map<llama_token, double> probabilities(const distribution & of) {
    std::map<llama_token, double> result;
    for (const auto & entry : of) {
        result[entry.id] = entry.p;
    }
    return result;
}

int main(int argc, char ** argv) {
    if (argc != 8) {
        return 2;
    }
    const std::string rule  = argv[2];
    const int         draws = std::atoi(argv[3]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    auto model_params  = llama_model_default_params();
    auto context_params = llama_context_default_params();
    context_params.n_ctx = 256;
    llama_model   * model = llama_model_load_from_file(argv[1], model_params);
    llama_context * ctx   = model ? llama_init_from_model(model, context_params) : nullptr;
    if (!ctx) {
        return 3;
    }
    common_params_sampling params;
    params.seed  = (uint32_t) std::atoi(argv[4]);
    params.temp  = std::strtof(argv[5], nullptr);
    params.top_k = std::atoi(argv[6]);
    params.top_p = std::strtof(argv[7], nullptr);
    params.min_p = 0.0f;
    common_sampler * sampler = common_sampler_init(model, params);

    const int  n_prompt = 24;
    const auto decode   = [&](llama_token after) {
        common_batch batch(ctx);
        for (int i = 0; i < n_prompt; ++i) {
            batch.add(200 + 37*i % 700, i, 0, i == n_prompt - 1);
        }
        if (after >= 0) {
            batch.add(after, n_prompt, 0, true);
        }
        llama_memory_clear(llama_get_memory(ctx), true);
        return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
    };
    if (decode(-1) != 0) {
        return 4;
    }
    const distribution first = target_at(sampler, ctx, n_prompt - 1);
    const llama_token  given = first[first.size() > 1].id;
    if (decode(given) != 0) {
        return 4;
    }
    const std::vector<int> idxs = { n_prompt - 1, n_prompt };
    const distribution     next = target_at(sampler, ctx, idxs[1]);

    // The draft's own distribution: flatter than the target's, without its last token, with one that the target never draws.
    distribution q(first.begin(), first.end() - (first.size() > 2));
    q.push_back({ 7, 0.0f, 0.1f });
    float sum = 0.0f;
    for (auto & entry : q) {
        entry.p = 0.5f*entry.p + 0.5f/q.size();
        sum += entry.p;
    }
    std::vector<float> weights;
    for (auto & entry : q) {
        entry.p /= sum;
        weights.push_back(entry.p);
    }

    std::mt19937 random(params.seed + 1);
    std::discrete_distribution<size_t>     pick(weights.begin(), weights.end());
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    std::map<llama_token, double> drawn, drawn_next;
    for (int i = 0; i < draws; ++i) {
        const llama_token drafted = rule == "match" ? given : q[pick(random)].id;
        std::vector<llama_token> accepted;
        if (rule == "match") {
            accepted = common_sampler_sample_and_accept_n(sampler, ctx, idxs, llama_tokens { drafted });
        } else if (rule == "rejection") {
            accepted = common_sampler_sample_and_accept_n_rejection(sampler, ctx, idxs, { drafted }, { q });
        } else if (rule == "always") {
            accepted = { drafted };
        } else {
            double p = 0.0, q_of = 1.0;
            for (const auto & entry : first) { p    = entry.id == drafted ? entry.p : p; }
            for (const auto & entry : q)     { q_of = entry.id == drafted ? entry.p : q_of; }
            accepted = { uniform(random) < p/q_of ? drafted : common_sampler_sample(sampler, ctx, idxs[0]) };
        }
        drawn[accepted[0]] += 1;
        if (accepted.size() > 1 && drafted == given) {
            drawn_next[accepted[1]] += 1;
        }
    }
    std::printf("{");
    print("expected",      probabilities(first), ", ");
    print("drawn",         drawn,                ", ");
    print("expected_next", probabilities(next),  ", ");
    print("drawn_next",    drawn_next,           "}\n");
    common_sampler_free(sampler);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
