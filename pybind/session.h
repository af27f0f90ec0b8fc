#pragma once

#include "native.h"

#include <optional>
#include <vector>

class controls;

struct load_options {
    int32_t n_gpu_layers = 0; // negative: all
    bool    cpu_experts  = false; // expert weights in host memory, whatever n_gpu_layers says
    bool    repack       = true;  // false: weights keep the file's layout, which slots need
    bool    mmap         = true;
};

class model {
  public:
    model(const std::string & path, const load_options & options);

    std::vector<llama_token> tokenize(const std::string & text, bool add_special, bool parse_special) const;
    py::bytes                piece(llama_token token, bool special) const;
    bool                     is_end(llama_token token) const;
    std::vector<llama_token> end_tokens() const;
    int32_t                  n_vocab() const;
    void                     close() { handle.reset(); }
    llama_model            * get() const; // raises EngineClosed

    std::shared_ptr<model_handle> handle;
};

// Greedy at temperature 0, else llama-server's chain: top_k, top_p, min_p, temperature, draw. `never`: tokens it must not choose.
class sampler {
  public:
    sampler(const model & m, float temperature, int32_t top_k, float top_p, float min_p, uint32_t seed, const std::vector<llama_token> & never);

    std::unique_ptr<llama_sampler, void (*)(llama_sampler *)> chain;
};

struct context_options {
    uint32_t n_ctx    = 0; // tokens; 0: the model's
    uint32_t n_batch  = 2048;
    uint32_t n_ubatch = 512;
    int32_t  n_threads       = 0; // 0: llama.cpp's default
    int32_t  n_threads_batch = 0;
    bool     trace_routing   = false;
};

// Sequence 0 of one llama_context. One thread at a time; the GIL is released while it computes.
class context {
  public:
    context(const model & m, const context_options & options);
    ~context() { handle->free(); } // controls that outlive it see it closed

    // llama_decode of `tokens` at `position`, logits for the last one. A signal (Ctrl-C) or cancel() ends it early.
    // Returns 0, 1 (the context is full), 2 (ended early) or less than 0 (failed).
    int32_t     decode(std::vector<llama_token> tokens, llama_pos position);
    llama_token sample(sampler & s);
    std::vector<std::pair<llama_token, float>> top_logprobs(int32_t n);

    bool keep(llama_pos n); // forget what is behind the first n tokens; false: not possible for this model, all is there still
    void clear();
    void close();
    void cancel(bool wanted) { cancelled = wanted; }

    std::unique_ptr<controls>                           new_controls() const;
    std::vector<std::pair<int, std::vector<std::vector<int32_t>>>> take_routing();

    std::shared_ptr<context_handle> handle;

  private:
    static bool should_abort(void * data);                         // on the first compute thread, which is the caller of decode
    static bool on_tensor(ggml_tensor * t, bool ask, void * data); // the routing of each layer

    std::atomic<bool>                       cancelled { false };
    bool                                    has_logits  = false;
    bool                                    on_main     = false; // signals are handled on the main thread only
    double                                  asked_at_ms = 0.0;
    std::unique_ptr<py::error_already_set>  interrupt; // raised by a signal handler during a decode
    std::vector<std::pair<int, std::vector<std::vector<int32_t>>>> routing_seen; // (layer, ids of each token)
};
