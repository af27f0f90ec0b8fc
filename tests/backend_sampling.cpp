// Tokens sampled on the device, in batches whose sizes come back: backend_sampling MODEL. Prints them.

#include "llama.h"

#include <cstdio>
#include <vector>

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    auto * model = argc > 1 ? llama_model_load_from_file(argv[1], llama_model_default_params()) : nullptr;
    if (!model) {
        return 1;
    }
    auto * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_top_k(40));
    llama_sampler_chain_add(chain, llama_sampler_init_temp(1.5f));
    llama_sampler_chain_add(chain, llama_sampler_init_dist(1234));
    std::vector<llama_sampler_seq_config> samplers { { 0, chain } };

    auto params = llama_context_default_params();
    params.n_ctx     = 1024;
    params.n_ubatch  = 128;
    params.n_threads = params.n_threads_batch = 2;
    params.samplers   = samplers.data();
    params.n_samplers = samplers.size();
    auto * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        return 1;
    }
    auto        batch = llama_batch_init(8, 0, 1);
    llama_pos   pos   = 0;
    llama_token last  = 5;
    for (int round = 0; round < 24; ++round) {
        const int sizes[] = { 1, 4, 2, 1, 3, 2, 4, 1 };
        batch.n_tokens = sizes[round % 8];
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = i == 0 ? last : 100 + i;
            batch.pos[i]       = pos++;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = i == batch.n_tokens - 1;
        }
        if (llama_decode(ctx, batch) != 0) {
            return 1;
        }
        const llama_token sampled = llama_get_sampled_token_ith(ctx, batch.n_tokens - 1); // negative: the context samples nothing there
        std::printf("%d\n", sampled);
        if (sampled >= 0) {
            llama_sampler_accept(chain, sampled);
            last = sampled;
        }
    }
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
