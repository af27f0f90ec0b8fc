// What llama_phase.Engine is made of: a model, a context with one sequence, a sampler.

#include "session.h"

#include "controls.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include <unistd.h>

//
// log
//

// llama.cpp says why something failed in its log only
static std::mutex       log_lock;
static std::string      log_errors; // since the last clear_errors()
static std::atomic<int> log_level { GGML_LOG_LEVEL_WARN };

// llama.cpp reports a decode that we ended as an error, on the thread that decodes
static thread_local bool ended_by_us = false;

// a model's loader warns about each tensor of an MTP block that is left out
static thread_local bool loading = false;

static void on_log(ggml_log_level level, const char * text, void *) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    last = level == GGML_LOG_LEVEL_CONT ? last : level;
    if (ended_by_us) {
        return;
    }
    if (last >= GGML_LOG_LEVEL_ERROR) {
        std::lock_guard<std::mutex> guard(log_lock);
        if (log_errors.size() < 2000) {
            log_errors += text;
        }
    }
    if (last >= (loading && log_level == GGML_LOG_LEVEL_WARN ? GGML_LOG_LEVEL_ERROR : log_level.load())) {
        fputs(text, stderr);
    }
}

static void clear_errors() {
    std::lock_guard<std::mutex> guard(log_lock);
    log_errors.clear();
}

// the errors on one line, or `otherwise`
static std::string last_errors(const std::string & otherwise) {
    std::lock_guard<std::mutex> guard(log_lock);
    std::string out = log_errors;
    while (!out.empty() && out.back() == '\n') {
        out.pop_back();
    }
    std::replace(out.begin(), out.end(), '\n', ';');
    return out.empty() ? otherwise : out;
}

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static bool on_main_thread() {
    const auto main = py::module_::import("threading").attr("main_thread")().attr("ident");
    return main.cast<unsigned long>() == PyThread_get_thread_ident();
}

// Runs pending signal handlers; what they raise is kept. The caller does not hold the GIL.
static bool signal_raised(std::unique_ptr<py::error_already_set> & raised) {
    py::gil_scoped_acquire acquire;
    if (raised || PyErr_CheckSignals() == 0) {
        return false;
    }
    raised = std::make_unique<py::error_already_set>();
    return true;
}

//
// model
//

struct load_watch {
    bool   on_main     = false;
    double asked_at_ms = 0.0;
    std::unique_ptr<py::error_already_set> interrupt;
};

static bool on_progress(float, void * data) {
    auto & watch = *(load_watch *) data;
    if (watch.on_main && now_ms() - watch.asked_at_ms > 20.0) {
        watch.asked_at_ms = now_ms();
        return !signal_raised(watch.interrupt);
    }
    return true;
}

model::model(const std::string & path, const load_options & options) {
    llama_model_params params = llama_model_default_params();

    const llama_model_tensor_buft_override overrides[] = {
        { "\\.ffn_(up|down|gate|gate_up)_(ch|)exps", ggml_backend_cpu_buffer_type() },
        { nullptr, nullptr },
    };
    load_watch watch;
    watch.on_main = on_main_thread();
    params.n_gpu_layers    = options.n_gpu_layers;
    params.use_extra_bufts = options.repack;
    params.load_mode       = options.mmap ? params.load_mode : LLAMA_LOAD_MODE_NONE;
    params.tensor_buft_overrides       = options.cpu_experts ? overrides : nullptr;
    params.progress_callback           = on_progress;
    params.progress_callback_user_data = &watch;

    clear_errors();
    handle = std::make_shared<model_handle>();
    handle->owner = getpid();
    {
        py::gil_scoped_release release;
        llama_backend_init();
        loading = true;
        handle->model = llama_model_load_from_file(path.c_str(), params);
        loading = false;
    }
    if (watch.interrupt) {
        throw py::error_already_set(*watch.interrupt);
    }
    if (!handle->model) {
        throw_typed("ModelError", path + " cannot be loaded: " + last_errors("no reason given"), "check the file, and the memory that is free");
    }
}

llama_model * model::get() const {
    if (!handle) {
        throw_typed("EngineClosed", "this model is closed", "load it again");
    }
    return handle->model;
}

int32_t model::n_vocab() const {
    return llama_vocab_n_tokens(llama_model_get_vocab(get()));
}

std::vector<llama_token> model::tokenize(const std::string & text, bool add_special, bool parse_special) const {
    const auto * vocab = llama_model_get_vocab(get());
    std::vector<llama_token> tokens(text.size() + 8);
    int32_t n = llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), add_special, parse_special);
    if (n < 0) {
        tokens.resize(-(int64_t) n);
        n = llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), add_special, parse_special);
    }
    tokens.resize(std::max(n, 0));
    return tokens;
}

py::bytes model::piece(llama_token token, bool special) const {
    const auto * vocab = llama_model_get_vocab(get());
    if (token < 0 || token >= n_vocab()) {
        throw py::value_error("token " + std::to_string(token) + " is not in the vocabulary");
    }
    std::string out(64, '\0');
    int32_t n = llama_token_to_piece(vocab, token, &out[0], (int32_t) out.size(), 0, special);
    if (n < 0) {
        out.resize(-(int64_t) n);
        n = llama_token_to_piece(vocab, token, &out[0], (int32_t) out.size(), 0, special);
    }
    return py::bytes(out.data(), std::max(n, 0));
}

bool model::is_end(llama_token token) const {
    return llama_vocab_is_eog(llama_model_get_vocab(get()), token);
}

//
// sampler
//

std::vector<llama_token> model::end_tokens() const {
    std::vector<llama_token> out;
    for (llama_token token = 0; token < n_vocab(); ++token) {
        if (is_end(token)) {
            out.push_back(token);
        }
    }
    return out;
}

sampler::sampler(const model & m, float temperature, int32_t top_k, float top_p, float min_p, uint32_t seed, const std::vector<llama_token> & never) :
        chain(llama_sampler_chain_init(llama_sampler_chain_default_params()), llama_sampler_free) {
    if (!never.empty()) {
        std::vector<llama_logit_bias> biases;
        for (const llama_token token : never) {
            biases.push_back({ token, -INFINITY });
        }
        llama_sampler_chain_add(chain.get(), llama_sampler_init_logit_bias(m.n_vocab(), (int32_t) biases.size(), biases.data()));
    }
    if (temperature <= 0.0f) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_greedy());
        return;
    }
    llama_sampler_chain_add(chain.get(), llama_sampler_init_top_k(top_k));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_top_p(top_p, 0));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_min_p(min_p, 0));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(temperature));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(seed));
}

//
// context
//

context::context(const model & m, const context_options & options) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx    = options.n_ctx;
    params.n_batch  = options.n_batch;
    params.n_ubatch = options.n_ubatch;
    params.n_threads       = options.n_threads > 0 ? options.n_threads : params.n_threads;
    params.n_threads_batch = options.n_threads_batch > 0 ? options.n_threads_batch : params.n_threads;
    params.swa_full = false; // as llama-server
    params.abort_callback      = should_abort;
    params.abort_callback_data = this;
    if (options.trace_routing) {
        params.cb_eval           = on_tensor;
        params.cb_eval_user_data = this;
    }
    auto * const llama = m.get();

    clear_errors();
    handle = std::make_shared<context_handle>();
    handle->owner = getpid();
    handle->model = m.handle;
    {
        py::gil_scoped_release release;
        handle->ctx = llama_init_from_model(llama, params);
    }
    if (!handle->ctx) {
        throw_typed("ModelError", "the context cannot be created: " + last_errors("no reason given"), "use a smaller ctx, ubatch or number of slots");
    }
}

bool context::should_abort(void * data) {
    auto & self = *(context *) data;
    if (self.on_main && now_ms() - self.asked_at_ms > 20.0) {
        self.asked_at_ms = now_ms();
        signal_raised(self.interrupt);
    }
    ended_by_us = self.cancelled || self.interrupt;
    return ended_by_us;
}

bool context::on_tensor(ggml_tensor * t, bool ask, void * data) {
    static const char NAME[] = "ffn_moe_topk-";
    if (strncmp(t->name, NAME, sizeof(NAME) - 1) != 0) {
        return false;
    }
    if (!ask) {
        std::vector<std::vector<int32_t>> rows(t->ne[1], std::vector<int32_t>(t->ne[0]));
        for (size_t i = 0; i < rows.size(); ++i) {
            ggml_backend_tensor_get(t, rows[i].data(), i*t->nb[1], rows[i].size()*sizeof(int32_t));
        }
        ((context *) data)->routing_seen.emplace_back(atoi(t->name + sizeof(NAME) - 1), std::move(rows));
    }
    return true;
}

int32_t context::decode(std::vector<llama_token> tokens, llama_pos position) {
    context_use ctx(*handle);
    if (tokens.empty()) {
        throw py::value_error("a batch has at least one token");
    }
    if (tokens.size() > llama_n_batch(*ctx)) {
        throw py::value_error("a batch has at most " + std::to_string(llama_n_batch(*ctx)) + " tokens, not " + std::to_string(tokens.size()));
    }
    const int32_t n = (int32_t) tokens.size();
    std::vector<llama_pos>      positions(n);
    std::vector<int32_t>        n_seq_id(n, 1);
    std::vector<int8_t>         logits(n, 0);
    llama_seq_id                seq_id = 0;
    std::vector<llama_seq_id *> seq_ids(n, &seq_id);
    for (int32_t i = 0; i < n; ++i) {
        positions[i] = position + i;
    }
    logits[n - 1] = 1;

    llama_batch batch = {};
    batch.n_tokens = n;
    batch.token    = tokens.data();
    batch.pos      = positions.data();
    batch.n_seq_id = n_seq_id.data();
    batch.seq_id   = seq_ids.data();
    batch.logits   = logits.data();

    has_logits  = false;
    asked_at_ms = now_ms();
    on_main     = on_main_thread();
    int32_t result;
    {
        py::gil_scoped_release release;
        result = llama_decode(*ctx, batch);
        llama_synchronize(*ctx);
        ended_by_us = false;
    }
    if (interrupt) {
        const auto raised = std::move(interrupt);
        throw py::error_already_set(*raised);
    }
    has_logits = result == 0;
    return result;
}

llama_token context::sample(sampler & s) {
    context_use ctx(*handle);
    if (!has_logits) {
        throw_typed("UsageError", "there is nothing to sample from", "decode a batch first");
    }
    py::gil_scoped_release release;
    return llama_sampler_sample(s.chain.get(), *ctx, -1);
}

std::vector<std::pair<llama_token, float>> context::top_logprobs(int32_t n) {
    context_use ctx(*handle);
    if (!has_logits) {
        throw_typed("UsageError", "there are no logits", "decode a batch first");
    }
    py::gil_scoped_release release;
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(*ctx)));
    const float * logits  = llama_get_logits_ith(*ctx, -1);
    std::vector<llama_token> order(n_vocab);
    for (int32_t i = 0; i < n_vocab; ++i) {
        order[i] = i;
    }
    const int32_t n_top = std::clamp(n, 1, n_vocab);
    std::partial_sort(order.begin(), order.begin() + n_top, order.end(), [&](llama_token a, llama_token b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp((double) logits[i] - logits[order[0]]);
    }
    std::vector<std::pair<llama_token, float>> top;
    for (int32_t i = 0; i < std::min(n, n_top); ++i) {
        top.emplace_back(order[i], (float) (logits[order[i]] - logits[order[0]] - std::log(sum)));
    }
    return top;
}

bool context::keep(llama_pos n) {
    context_use ctx(*handle);
    auto * const memory = llama_get_memory(*ctx);
    // a window that has moved on, or a recurrent state, misses what came before it
    const llama_pos first = llama_memory_seq_pos_min(memory, 0);
    if (first < 0 || (first > 0 && first >= n - llama_model_n_swa(llama_get_model(*ctx)))) {
        return false;
    }
    has_logits = false;
    return llama_memory_seq_rm(memory, 0, n, -1);
}

void context::clear() {
    context_use ctx(*handle);
    has_logits = false;
    llama_memory_clear(llama_get_memory(*ctx), true);
}

void context::close() {
    if (!handle->ctx || handle->owner != getpid()) {
        handle->ctx = nullptr;
        return;
    }
    context_use ctx(*handle);
    py::gil_scoped_release release;
    handle->free();
    handle->model.reset();
}

std::unique_ptr<controls> context::new_controls() const {
    return std::make_unique<controls>(handle);
}

std::vector<std::pair<int, std::vector<std::vector<int32_t>>>> context::take_routing() {
    context_use ctx(*handle);
    return std::move(routing_seen);
}

void bind_session(py::module_ & m) {
    m.def("set_log_level", [](int level) {
        log_level = level;
        llama_log_set(on_log, nullptr);
    }, py::arg("level"), "What llama.cpp prints on stderr from now on: 1 debug, 2 info, 3 warnings, 4 errors, 5 nothing. Process-wide.");

    py::class_<model>(m, "Model", "A GGUF file, loaded. Raises ModelError with llama.cpp's reason.")
        .def(py::init([](const std::string & path, int32_t n_gpu_layers, bool cpu_experts, bool repack, bool mmap) {
            return std::make_unique<model>(path, load_options { n_gpu_layers, cpu_experts, repack, mmap });
        }), py::arg("path"), py::arg("n_gpu_layers") = 0, py::arg("cpu_experts") = false, py::arg("repack") = true, py::arg("mmap") = true)
        .def("tokenize", &model::tokenize, py::arg("text"), py::arg("add_special") = true, py::arg("parse_special") = true, "Token ids of a text.")
        .def("piece", &model::piece, py::arg("token"), py::arg("special") = false, "The bytes of a token; several may make one character.")
        .def("is_end", &model::is_end, py::arg("token"), "Whether the token ends an answer.")
        .def("close", &model::close, py::call_guard<py::gil_scoped_release>(), "Give the weights up; they go with the last context that uses them. Idempotent.")
        .def_property_readonly("end_tokens", &model::end_tokens, "Tokens that end an answer.")
        .def_property_readonly("n_vocab", &model::n_vocab);

    py::class_<sampler>(m, "Sampler", "Greedy at temperature 0, else llama-server's order: top_k, top_p, min_p, temperature, draw.")
        .def(py::init<const model &, float, int32_t, float, float, uint32_t, const std::vector<llama_token> &>(), py::arg("model"),
             py::arg("temperature") = 0.0f, py::arg("top_k") = 40, py::arg("top_p") = 0.95f, py::arg("min_p") = 0.05f, py::arg("seed") = 0,
             py::arg("never") = std::vector<llama_token>());

    py::class_<context>(m, "Context", "Sequence 0 of a llama_context. One thread at a time (EngineBusy); the GIL is released while it computes.")
        .def(py::init([](const model & m, uint32_t n_ctx, uint32_t n_batch, uint32_t n_ubatch, int32_t n_threads, int32_t n_threads_batch, bool trace_routing) {
            return std::make_unique<context>(m, context_options { n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, trace_routing });
        }), py::arg("model"), py::arg("n_ctx") = 0, py::arg("n_batch") = 2048, py::arg("n_ubatch") = 512, py::arg("n_threads") = 0, py::arg("n_threads_batch") = 0,
            py::arg("trace_routing") = false)
        .def("decode", &context::decode, py::arg("tokens"), py::arg("position"),
             "Decode token ids at `position` (tokens), at most n_batch. Returns 0, 1 (the context is full), 2 (ended by cancel) or less than 0\n"
             "(failed). What a signal handler raises meanwhile (KeyboardInterrupt) ends it and is raised.")
        .def("sample", &context::sample, py::arg("sampler"), "The next token, from the logits of the last token decoded.")
        .def("top_logprobs", &context::top_logprobs, py::arg("n"), "(token, log-probability) of the likeliest n next tokens.")
        .def("keep", &context::keep, py::arg("n"), "Forget what is behind the first n tokens. False: this model cannot, nothing changed.")
        .def("clear", &context::clear, "Forget all tokens.")
        .def("cancel", &context::cancel, py::arg("wanted") = true, "End the decode in progress and all further ones, until cancel(False). From any thread.")
        .def("close", &context::close, "Free it. Idempotent; EngineBusy while another thread decodes.")
        .def("controls", &context::new_controls, "The phases of this context.")
        .def("take_routing", &context::take_routing, "(layer, [[expert ids] per token]) of every layer and micro-batch since the last call; with trace_routing.")
        .def_property_readonly("closed", [](const context & c) { return !c.handle->ctx; })
        .def_property_readonly("n_ctx", [](const context & c) { return llama_n_ctx(*context_use(*c.handle)); }, "Tokens it holds.")
        .def_property_readonly("n_batch", [](const context & c) { return llama_n_batch(*context_use(*c.handle)); }, "Tokens of one decode.")
        .def_property_readonly("address", [](const context & c) { return (uintptr_t) *context_use(*c.handle); }, "Of the llama_context, for other bindings.");
}
