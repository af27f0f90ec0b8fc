#pragma once

// What tools/server calls, so that each seam there is a line or two. Header only: the server links the C API of libllama.

#include "llama-phase.h"
#include "log.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace phase_server {

inline void log_event(const llama_phase_event * event, void *) {
    static const char * const WHAT[] = { "entered the prefill phase", "left the prefill phase", "not entered, rolled back", "FAILED" };
    LOG_INF("llama-phase: %s in %.1f ms, ubatch %u, compute buffers %.1f MiB%s%s\n", WHAT[event->type], event->ms, event->ubatch,
            event->buffer_bytes/1048576.0, event->reason[0] ? ": " : "", event->reason);
}

// the texts grow between two calls (times do), so ask until it fits
inline std::string text(const std::function<int32_t(char *, size_t)> & write) {
    std::string out(4096, '\0');
    size_t n;
    while ((n = (size_t) write(&out[0], out.size())) >= out.size()) {
        out.resize(n + 256);
    }
    out.resize(n);
    return out;
}

// Both contexts have been created, and whatever else takes device memory; `draft` may be null.
inline void attach(llama_context * target, llama_context * draft) {
    llama_phase_set_callback(target, log_event, nullptr);
    if (draft) {
        llama_phase_join(target, draft);
    }
    std::istringstream candidates(text([&](char * buf, size_t size) { return llama_phase_candidates(target, buf, size); }));
    for (std::string line; std::getline(candidates, line);) {
        LOG_INF("llama-phase: %s\n", line.c_str());
    }
}

inline std::string reason(const llama_context * ctx) {
    const char * failure = ctx ? llama_phase_failure(ctx) : nullptr;
    return std::string("llama-phase: no decode buffers: ") + (failure ? failure : "of another context");
}

// The process is to end with llama_phase_exit_code(). A client that never reads its answer, or one that came after the last
// one was sent, must not keep it: after the grace time it ends whoever waits.
inline void end_soon() {
    std::thread([] {
        std::this_thread::sleep_for(std::chrono::seconds(5));
        std::_Exit(llama_phase_exit_code());
    }).detach();
}

// Throws std::runtime_error with the reason once the context is unusable; the server then answers 503 and ends.
inline void check(int32_t result, const llama_context * ctx) {
    if (result < 0) {
        throw std::runtime_error(reason(ctx));
    }
}

// returns the micro-batch in tokens that the prompt's batches will be cut into
inline int32_t prompt_begin(llama_context * ctx, llama_seq_id seq_id, int32_t n_new) {
    const int32_t n_ubatch = llama_phase_prompt_begin(ctx, seq_id, n_new);
    check(n_ubatch, ctx);
    return n_ubatch;
}

inline void prompt_done(llama_context * ctx, llama_seq_id seq_id) {
    check(llama_phase_prompt_done(ctx, seq_id), ctx);
}

// where drafting is to stop: the chosen length, no limit of ours when it was not chosen
inline int32_t draft_stop(const llama_context * ctx, int32_t n_chosen) {
    return llama_phase_draft_adaptive(ctx) ? n_chosen : INT32_MAX;
}

} // namespace phase_server
