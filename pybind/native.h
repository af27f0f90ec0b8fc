#pragma once

// What the parts of llama_phase._engine share: handles that know their process, typed errors, and the state of the interpreter.

#include "llama-phase.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include <sys/types.h>

namespace py = pybind11;

// Raises an error of llama_phase.errors. The caller holds the GIL.
[[noreturn]] void throw_typed(const char * type, const std::string & message, const std::string & fix = "");

// Set by an atexit hook: destructors that run later free nothing, since the libraries' own statics may be gone.
extern std::atomic<bool> interpreter_ends;

// Whether what was created in process `owner` may be freed now. After a fork threads, locks and device contexts are the parent's.
bool may_free(pid_t owner);

struct model_handle {
    llama_model * model = nullptr;
    pid_t         owner = 0;

    ~model_handle();
};

// Shared by a context and its controls, so that each sees when it is gone. The context is freed before its model.
struct context_handle {
    llama_context               * ctx   = nullptr; // null: closed
    pid_t                         owner = 0;
    std::shared_ptr<model_handle> model;
    std::mutex                    busy; // held while a thread is inside llama.cpp; never waited for: a second thread is refused

    ~context_handle();
    void free();
};

// Exclusive use of a context by this thread. Raises EngineClosed or EngineBusy.
class context_use {
  public:
    explicit context_use(context_handle & handle);

    llama_context * operator*() const { return handle.ctx; }

  private:
    context_handle             & handle;
    std::unique_lock<std::mutex> lock;
};

// the text of a writer that follows llama_phase_json
template <typename writer> std::string growing_text(writer && write) {
    std::string out(8192, '\0');
    size_t n;
    while ((n = (size_t) write(&out[0], out.size())) >= out.size()) {
        out.resize(n + 1024);
    }
    out.resize(n);
    return out;
}

void bind_policy(py::module_ & m);
void bind_session(py::module_ & m);
void bind_controls(py::module_ & m);
