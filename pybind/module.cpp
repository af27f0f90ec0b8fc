#include "native.h"

#include <unistd.h>

std::atomic<bool> interpreter_ends { false };

void throw_typed(const char * type, const std::string & message, const std::string & fix) {
    const py::object kind  = py::module_::import("llama_phase.errors").attr(type);
    const py::object error = kind(message, py::arg("fix") = fix);
    PyErr_SetObject(kind.ptr(), error.ptr());
    throw py::error_already_set();
}

bool may_free(pid_t owner) {
    return owner == getpid() && !interpreter_ends;
}

model_handle::~model_handle() {
    if (model && may_free(owner)) {
        llama_model_free(model);
    }
}

context_handle::~context_handle() {
    free();
}

void context_handle::free() {
    auto * const freed = ctx;
    ctx = nullptr; // others see it closed before it is
    if (freed && may_free(owner)) {
        llama_free(freed);
    }
}

context_use::context_use(context_handle & handle) : handle(handle), lock(handle.busy, std::defer_lock) {
    if (handle.owner != getpid()) { // asked first: the lock may be held by a thread that only the parent has
        throw_typed("EngineClosed", "this context belongs to process " + std::to_string(handle.owner) + ", which forked this one", "create a new one in the child");
    }
    if (!lock.try_lock()) {
        throw_typed("EngineBusy", "another thread is using this context", "wait for it, or give each thread its own");
    }
    if (!handle.ctx) {
        throw_typed("EngineClosed", "this context is closed", "create a new one");
    }
}

PYBIND11_MODULE(_engine, m) {
    m.doc() = "The engine's C API and its pure modules. People use llama_phase.Engine, attach, environment and sim instead.";
    bind_policy(m);
    bind_controls(m);
    bind_session(m);

    py::module_::import("atexit").attr("register")(py::cpp_function([] { interpreter_ends = true; }));
}
