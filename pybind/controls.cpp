// llama-phase.h on a context: one of ours, or any address.

#include "controls.h"

#include <unistd.h>

controls::controls(uintptr_t address) : ctx((llama_context *) address), owner(getpid()) {
    if (!ctx) {
        throw_typed("UsageError", "a context has no address 0");
    }
}

controls::controls(std::shared_ptr<context_handle> handle) : handle(std::move(handle)), owner(getpid()) {}

controls::~controls() {
    if (!closed && may_free(owner) && callback) {
        if (auto * context = living()) {
            llama_phase_set_callback(context, nullptr, nullptr);
        }
    }
    if (!may_free(owner)) {
        callback.release(); // the interpreter that owns it ends
    }
}

llama_context * controls::living() const {
    return handle ? handle->ctx : ctx;
}

llama_context * controls::use() const {
    if (closed || !living()) {
        throw_typed("EngineClosed", "these controls are closed", "attach again to a living context");
    }
    if (owner != getpid()) {
        throw_typed("EngineClosed", "these controls belong to process " + std::to_string(owner) + ", which forked this one", "create new ones in the child");
    }
    return living();
}

void controls::close() {
    if (closed) {
        return;
    }
    set_callback(py::none());
    closed = true;
}

int32_t controls::prompt_begin(int32_t n_new, llama_seq_id seq_id) {
    auto * context = use();
    const auto exclusive = handle ? std::make_unique<context_use>(*handle) : nullptr;
    int32_t result;
    {
        py::gil_scoped_release release;
        result = llama_phase_prompt_begin(context, seq_id, n_new);
    }
    return checked(result);
}

void controls::prompt_end(llama_seq_id seq_id, bool aborted) {
    auto * context = use();
    const auto exclusive = handle ? std::make_unique<context_use>(*handle) : nullptr;
    int32_t result;
    {
        py::gil_scoped_release release;
        result = aborted ? llama_phase_prompt_abort(context, seq_id) : llama_phase_prompt_done(context, seq_id);
    }
    checked(result);
}

int32_t controls::checked(int32_t result) {
    if (result < 0) {
        throw_typed("EngineUnusable", "the context cannot compute any more: " + failure().value_or("no reason given"), "close it and create a new one");
    }
    return result;
}

std::optional<std::string> controls::failure() const {
    const char * text = llama_phase_failure(use());
    return text ? std::optional<std::string>(text) : std::nullopt;
}

py::dict controls::stats() const {
    llama_phase_stats s = {};
    s.size = sizeof(s);
    const bool has_phases = llama_phase_get_stats(use(), &s);

    py::dict out;
    out["has_phases"]     = has_phases;
    out["phase"]          = s.phase == LLAMA_PHASE_PREFILL ? "prefill" : "decode";
    out["ubatch_decode"]  = s.ubatch_decode;
    out["ubatch_prefill"] = s.ubatch_prefill;
    out["min_tokens"]     = s.min_tokens;
    out["n_entered"]      = s.n_entered;
    out["n_left"]         = s.n_left;
    out["n_rolled_back"]  = s.n_rolled_back;
    out["n_failed"]       = s.n_failed;
    out["n_short"]        = s.n_short;
    out["n_blocked"]      = s.n_blocked;
    out["n_aborted"]      = s.n_aborted;
    out["enter_ms_last"]  = s.enter_ms_last;
    out["leave_ms_last"]  = s.leave_ms_last;
    out["buffer_bytes"]   = s.buffer_bytes;
    return out;
}

std::string controls::json() const {
    auto * context = use(); // the GIL stays held: whoever closes the context needs it
    return growing_text([&](char * buf, size_t size) { return llama_phase_context_json(context, buf, size); });
}

bool controls::join(const controls & member) {
    return llama_phase_join(use(), member.use());
}

void controls::reset() {
    llama_phase_reset(use());
}

void controls::set_callback(py::object function) {
    auto * context = closed ? nullptr : living();
    if (context && owner == getpid()) {
        llama_phase_set_callback(context, function.is_none() ? nullptr : &controls::on_event, this);
    }
    callback = function.is_none() ? py::object() : std::move(function);
}

// On the thread that decodes, which released the GIL. Nothing may be thrown through the engine.
void controls::on_event(const llama_phase_event * event, void * user_data) {
    static const char * const KINDS[] = { "entered", "left", "rolled_back", "failed" };
    auto * self = (controls *) user_data;
    if (interpreter_ends || self->owner != getpid()) {
        return;
    }
    py::gil_scoped_acquire acquire;
    try {
        const py::object function = self->callback; // may be replaced by the call
        if (function) {
            function(py::dict(py::arg("kind") = KINDS[event->type], py::arg("ms") = event->ms, py::arg("ubatch") = event->ubatch,
                              py::arg("buffer_bytes") = event->buffer_bytes, py::arg("step") = event->step, py::arg("reason") = event->reason));
        }
    } catch (py::error_already_set & error) {
        error.discard_as_unraisable("a callback of llama_phase");
    } catch (const std::exception &) {
        // the event could not be made into a dict: nobody to tell
    }
}

void bind_controls(py::module_ & m) {
    py::class_<controls>(m, "Controls", "The phases of one llama_context. `address` has to stay the address of a living context until close().")
        .def(py::init<uintptr_t>(), py::arg("address"))
        .def("prompt_begin", &controls::prompt_begin, py::arg("n_new"), py::arg("seq_id") = 0,
             "A prompt of `n_new` uncached tokens begins. Returns the micro-batch in tokens. Raises EngineUnusable.")
        .def("prompt_done", [](controls & c, llama_seq_id seq_id) { c.prompt_end(seq_id, false); }, py::arg("seq_id") = 0,
             "The prompt has been decoded; call it before its first token is sampled. Raises EngineUnusable.")
        .def("prompt_abort", [](controls & c, llama_seq_id seq_id) { c.prompt_end(seq_id, true); }, py::arg("seq_id") = 0,
             "The prompt was cancelled; nothing happens without one. Raises EngineUnusable.")
        .def("join", &controls::join, py::arg("member"), "Let the other context switch with this one. False: one of them has no phases, or is in prefill.")
        .def("reset", &controls::reset, "Forget the failures after which a switch is not tried any more.")
        .def("stats", &controls::stats, "The counters of llama_phase_stats (tokens, milliseconds, bytes).")
        .def("json", &controls::json, "What GET /phase says, as JSON text.")
        .def("set_callback", &controls::set_callback, py::arg("function").none(true),
             "`function(event: dict)` on the thread that decodes; it must not use the context. What it raises goes to sys.unraisablehook.")
        .def("close", &controls::close, "Take the callback off. Idempotent.")
        .def_property_readonly("closed", [](const controls & c) { return c.closed || !c.living(); })
        .def_property_readonly("failure", &controls::failure, "Why the context cannot compute any more, or None.");

    m.def("exit_code", &llama_phase_exit_code, "75 once any context of this process became unusable, else 0.");
    m.def("prometheus", [] { return growing_text(llama_phase_prometheus); }, py::call_guard<py::gil_scoped_release>(),
          "The metrics of the oldest living context with phases; empty without one.");
    m.def("symbol_address", [] { return (uintptr_t) &llama_phase_current; },
          "Where llama_phase_current is, to tell whether another binding in this process uses the same library.");
}
