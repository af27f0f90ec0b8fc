// A program on libllama without server hooks, for test_hookless.py: phase_api MODEL COMMAND...
//
// Commands work on the current context; each prints a line of JSON with its result and the state after it.
//   new:N_UBATCH     create a context (n_batch 1024, n_ctx 4096) and make it the current one
//   raw              comes first: weights keep the file's layout
//   free             frees the current context; then comes use or new
//   use:I            make context I the current one
//   decode:N         decode a batch of N tokens at the end of sequence 0; result: of llama_decode
//   clear            forget sequence 0
//   begin:N done abort      explicit events on sequence 0
//   join:I           context I becomes a member
//   reset
//   top              result: the likeliest token behind the last batch
//   scores           result: a hash of all scores behind the last batch
//   figure:NAME      result: the first figure of that name in the context's JSON
//   copied           result: 1 when the first layer's experts are in a pinned copy, since a fault was injected
//   train            prepare the context for training, without parameters: the scheduler is made anew
//   short            get_stats with the size of a caller that knows the first five members only; result: its n_entered, untouched

#include "llama-phase.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

struct entry {
    explicit entry(llama_context * ctx) : ctx(ctx) {}

    llama_context * ctx;
    int             n_past = 0;
    std::string     events;
};

static void on_event(const llama_phase_event * event, void * user_data) {
    static const char * const NAMES[] = { "entered", "left", "rolled_back", "failed" };
    std::string & events = *(std::string *) user_data;
    events += std::string(events.empty() ? "\"" : ", \"") + NAMES[event->type] + (event->step[0] ? ":" : "") + event->step + "\"";
}

static int decode(entry & e, int n) {
    std::vector<llama_token> tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back(100 + (e.n_past + i)*37 % 3000);
    }
    const int result = llama_decode(e.ctx, llama_batch_get_one(tokens.data(), n));
    e.n_past += result == 0 ? n : 0;
    return result;
}

static const char * json_of(llama_context * ctx) {
    static char text[1 << 20];
    llama_phase_context_json(ctx, text, sizeof(text));
    return text;
}

static int says(llama_context * ctx, const char * what) {
    return strstr(json_of(ctx), what) ? 1 : 0;
}

static int figure(llama_context * ctx, const std::string & name) {
    const std::string key = "\"" + name + "\":";
    const char * at = strstr(json_of(ctx), key.c_str());
    return at ? atoi(at + key.size()) : -1;
}

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level >= GGML_LOG_LEVEL_WARN) { fputs(text, stderr); } }, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = argc < 3 || std::string(argv[2]) != "raw";
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        return 1;
    }
    std::vector<entry *> entries;
    entry * now = nullptr;

    for (int i = 2; i < argc; ++i) {
        const std::string command = argv[i];
        const auto colon = command.find(':');
        const std::string name = command.substr(0, colon);
        const int n = colon == std::string::npos ? 0 : atoi(command.c_str() + colon + 1);

        int result = 0;
        if (name == "raw") {
            continue;
        }
        if (name == "free") {
            llama_free(now->ctx);
            now->ctx = nullptr;
            continue;
        }
        if (name == "new") {
            llama_context_params params = llama_context_default_params();
            params.n_ctx           = 4096;
            params.n_batch         = 1024;
            params.n_ubatch        = n;
            params.n_threads       = 1;
            params.n_threads_batch = 1;
            now = new entry(llama_init_from_model(model, params));
            entries.push_back(now);
            llama_phase_set_callback(now->ctx, on_event, &now->events);
        }
        if (name == "use")    { now = entries[n]; }
        if (name == "decode") { result = decode(*now, n); }
        if (name == "clear")  { llama_memory_clear(llama_get_memory(now->ctx), true); now->n_past = 0; }
        if (name == "begin")  { result = llama_phase_prompt_begin(now->ctx, 0, n); }
        if (name == "done")   { result = llama_phase_prompt_done(now->ctx, 0); }
        if (name == "abort")  { result = llama_phase_prompt_abort(now->ctx, 0); }
        if (name == "join")   { result = llama_phase_join(now->ctx, entries[n]->ctx); }
        if (name == "reset")  { llama_phase_reset(now->ctx); }
        if (name == "top")    {
            const float * logits = llama_get_logits_ith(now->ctx, -1);
            result = (int) (std::max_element(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model))) - logits);
        }
        if (name == "copied") { result = says(now->ctx, "{\"layer\":0,\"reason\":\"injected fault\"}"); }
        if (name == "scores") {
            const char * bytes = (const char *) llama_get_logits_ith(now->ctx, -1);
            const size_t size  = llama_vocab_n_tokens(llama_model_get_vocab(model))*sizeof(float);
            result = (int) std::hash<std::string_view>()({ bytes, size });
        }
        if (name == "figure") { result = figure(now->ctx, command.substr(colon + 1)); }
        if (name == "train")  {
            llama_opt_params params = {};
            params.param_filter   = [](const ggml_tensor *, void *) { return false; };
            params.get_opt_pars   = ggml_opt_get_default_optimizer_params;
            params.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_SGD;
            llama_opt_init(now->ctx, model, params);
        }
        if (name == "short")  {
            llama_phase_stats old = {};
            old.size      = offsetof(llama_phase_stats, n_entered);
            old.n_entered = 77;
            llama_phase_get_stats(now->ctx, &old);
            result = (int) old.n_entered;
        }

        llama_phase_stats s = {};
        s.size = sizeof(s);
        const bool has_phases = llama_phase_get_stats(now->ctx, &s);
        const char * failure = llama_phase_failure(now->ctx);
        printf("{\"command\": \"%s\", \"result\": %d, \"has_phases\": %s, \"phase\": \"%s\", \"ubatch_decode\": %u, \"ubatch_prefill\": %u, "
               "\"min_tokens\": %u, \"entered\": %d, \"left\": %d, \"rolled_back\": %d, \"failed\": %d, \"short\": %d, \"blocked\": %d, "
               "\"aborted\": %d, \"bytes\": %.0f, \"failure\": \"%s\", \"events\": [%s]}\n",
               command.c_str(), result, has_phases ? "true" : "false",
               llama_phase_current(now->ctx) == LLAMA_PHASE_PREFILL ? "prefill" : "decode", s.ubatch_decode, s.ubatch_prefill, s.min_tokens,
               (int) s.n_entered, (int) s.n_left, (int) s.n_rolled_back, (int) s.n_failed, (int) s.n_short, (int) s.n_blocked,
               (int) s.n_aborted, (double) s.buffer_bytes, failure ? failure : "", now->events.c_str());
    }
    for (entry * e : entries) {
        if (e->ctx) {
            llama_free(e->ctx);
        }
        delete e;
    }
    llama_model_free(model);
    return llama_phase_exit_code();
}
