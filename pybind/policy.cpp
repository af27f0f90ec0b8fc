// The pure modules: slot policy, transaction and configuration. No context, no device.

#include "native.h"

#include "phase-config.h"
#include "slot-policy.h"
#include "transaction.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>

namespace {

using routing = std::vector<std::vector<int32_t>>;

class policy {
  public:
    policy(int32_t n_expert, int32_t n_slots) :
            words(checked_words(n_expert, n_slots)), slots(words.data(), n_expert, n_slots) {
        slots.clear();
    }

    std::vector<int32_t> fetch(const std::vector<int32_t> & ids) {
        check(ids);
        std::vector<int32_t> out(ids.size());
        slots.fetch(ids.data(), (int32_t) ids.size(), out.data(), counters);
        return out;
    }

    void replay(const routing & steps) {
        for (const auto & ids : steps) {
            fetch(ids);
        }
    }

    void fill(const std::vector<int32_t> & experts) {
        for (const int32_t id : experts) {
            check_id(id);
        }
        if (std::set<int32_t>(experts.begin(), experts.end()).size() != experts.size()) {
            throw std::invalid_argument("an expert is named twice");
        }
        const auto n = (int32_t) std::min<size_t>(experts.size(), slots.n_slots);
        const std::vector<int32_t> wanted(experts.rbegin(), experts.rbegin() + n);
        phase_op_counters uncounted = {};
        slots.clear(n);
        for (int32_t i = 0; i < n; i += PHASE_MAX_IDS) {
            slots.fill(wanted.data() + i, std::min(n - i, PHASE_MAX_IDS), n - i, uncounted);
        }
    }

    void clear() {
        slots.clear();
        counters = {};
    }

    std::vector<std::pair<int32_t, int32_t>> jobs() const {
        std::vector<std::pair<int32_t, int32_t>> out;
        for (int32_t i = 0; i < *slots.n_jobs; ++i) {
            out.emplace_back(slots.jobs[2*i], slots.jobs[2*i + 1]);
        }
        return out;
    }

  private:
    std::vector<int32_t> words;

  public:
    slot_policy       slots;
    phase_op_counters counters = {};

  private:
    static size_t checked_words(int32_t n_expert, int32_t n_slots) {
        if (n_expert < 1 || n_slots < 1) {
            throw std::invalid_argument("n_expert and n_slots are at least 1");
        }
        return phase_state_words(n_expert, n_slots);
    }

    void check_id(int32_t id) const {
        if (id < 0 || id >= slots.n_expert) {
            throw std::invalid_argument("expert " + std::to_string(id) + " is not in 0.." + std::to_string(slots.n_expert - 1));
        }
    }

    void check(const std::vector<int32_t> & ids) const {
        for (const int32_t id : ids) {
            check_id(id);
        }
        if (ids.size() > (size_t) PHASE_MAX_IDS) {
            throw std::invalid_argument("a fetch has at most " + std::to_string(PHASE_MAX_IDS) + " ids, not " + std::to_string(ids.size()));
        }
        const size_t distinct = std::set<int32_t>(ids.begin(), ids.end()).size();
        if (distinct > (size_t) slots.n_slots) {
            throw std::invalid_argument(std::to_string(distinct) + " different experts do not fit into " + std::to_string(slots.n_slots) + " slots");
        }
    }
};

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A step may raise any Exception, which fails it; others (KeyboardInterrupt) fail it as well and are raised again at the end.
std::function<int64_t()> effect(const py::object & callable, py::object & raised) {
    if (callable.is_none()) {
        return nullptr;
    }
    return [callable, &raised]() -> int64_t {
        try {
            const py::object bytes = callable();
            return bytes.is_none() ? 0 : bytes.cast<int64_t>();
        } catch (py::error_already_set & error) {
            if (!error.matches(PyExc_Exception)) {
                raised = error.value();
            }
            throw std::runtime_error(py::str(error.value()).cast<std::string>());
        }
    };
}

py::dict run_transaction(const std::vector<std::tuple<std::string, py::object, std::string, py::object>> & steps,
                         const std::vector<std::pair<std::string, uint64_t>> & faults, const py::object & clock) {
    py::object raised = py::none();

    std::vector<phase_step> native;
    for (const auto & [name, act, undo_name, undo] : steps) {
        native.push_back({ name, effect(act, raised), undo_name, effect(undo, raised) });
    }
    std::vector<phase_fault> planned;
    for (const auto & [step, nth] : faults) {
        planned.push_back({ step, nth });
    }
    phase_faults injected(planned);
    const phase_report report = phase_transaction_run(native, injected, clock.is_none() ? phase_clock(now_ms) : [&] { return clock().cast<double>(); });
    if (!raised.is_none()) {
        PyErr_SetObject((PyObject *) Py_TYPE(raised.ptr()), raised.ptr());
        throw py::error_already_set();
    }

    static const char * const OUTCOMES[] = { "committed", "rolled back", "broken" };
    py::list records;
    for (const auto & step : report.steps) {
        records.append(py::dict(py::arg("name") = step.name, py::arg("ms") = step.ms, py::arg("bytes") = step.bytes, py::arg("ok") = step.ok));
    }
    return py::dict(py::arg("outcome") = OUTCOMES[report.outcome], py::arg("failed_step") = report.failed_step, py::arg("reason") = report.reason,
                    py::arg("ms") = report.ms, py::arg("steps") = records);
}

} // namespace

void bind_policy(py::module_ & m) {
    m.attr("MAX_IDS") = PHASE_MAX_IDS;

    py::class_<policy>(m, "SlotPolicy", "Which expert of one layer sits in which slot: the LRU that the engine runs, without weights.")
        .def(py::init<int32_t, int32_t>(), py::arg("n_expert"), py::arg("n_slots"))
        .def("fetch", &policy::fetch, py::arg("ids"),
             "Slots of the experts `ids` (one batch; repeats allowed), the missing ones brought in. Raises ValueError for an id out of\n"
             "range, more than MAX_IDS ids, or more different ones than there are slots.")
        .def("replay", &policy::replay, py::arg("steps"), py::call_guard<py::gil_scoped_release>(), "One fetch per entry; see `fetch`.")
        .def("fill", &policy::fill, py::arg("experts"), "Forget all, then hold `experts`, the least recently used first; the last n_slots of them.")
        .def("clear", &policy::clear, "Forget experts and counters.")
        .def_property_readonly("jobs", &policy::jobs, "(expert, slot) pairs that the last fetch copied.")
        .def_property_readonly("resident", [](const policy & p) { return p.slots.resident(); }, "Experts held, the least recently used first.")
        .def_property_readonly("n_expert", [](const policy & p) { return p.slots.n_expert; })
        .def_property_readonly("n_slots", [](const policy & p) { return p.slots.n_slots; })
        .def_property_readonly("looked_up", [](const policy & p) { return p.counters.looked_up; }, "Ids so far.")
        .def_property_readonly("missed", [](const policy & p) { return p.counters.missed; }, "Experts copied so far.")
        .def_property_readonly("evicted", [](const policy & p) { return p.counters.evicted; }, "Copies that overwrote another expert.")
        .def_property_readonly("runs", [](const policy & p) { return p.counters.runs; }, "Fetches so far.");

    m.def("run_transaction", &run_transaction, py::arg("steps"), py::arg("faults") = py::list(), py::arg("clock") = py::none(),
          "Run steps with an undo journal, as the engine switches phases. `steps`: (name, act, undo_name, undo), act and undo without\n"
          "arguments, returning bytes allocated (> 0), freed (< 0) or None; an exception fails the step. `faults`: (name, n) makes the\n"
          "n-th run of a step fail (0: every one). `clock`: milliseconds. Returns outcome (committed, rolled back, broken), failed_step,\n"
          "reason, ms and steps. What is no Exception (KeyboardInterrupt) is rolled back and raised again.");

    m.def("check_environment", [](const phase_environment & variables) { phase_config_parse(variables); }, py::arg("variables"),
          "Parse LLAMA_PHASE_* as the engine will: (name, value) pairs. Raises ValueError naming the variable and what is accepted.");
}
