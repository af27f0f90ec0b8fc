#pragma once

// A sequence of steps with an undo journal. Pure: the clock, the faults and the effects are injected.
//
//   run:   for each step: put its undo into the journal, then act
//   throw: the journal is played backwards, the undo of the step that threw included, so an undo has to be
//          safe after a step that did nothing or only half of its work
//
// PHASE_BROKEN means that an undo threw as well: nothing is known about the resources any more.

#include "phase-config.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

struct phase_step {
    std::string              name;
    std::function<int64_t()> act;       // returns bytes allocated (> 0) or freed (< 0); throws std::exception on failure
    std::string              undo_name; // empty: nothing to undo
    std::function<int64_t()> undo;      // as act
};

struct phase_step_record {
    std::string name;
    double      ms    = 0.0;
    int64_t     bytes = 0;
    bool        ok    = false;
};

enum phase_outcome {
    PHASE_COMMITTED,
    PHASE_ROLLED_BACK,
    PHASE_BROKEN,
};

struct phase_report {
    phase_outcome outcome = PHASE_COMMITTED;
    std::string   failed_step; // empty when committed
    std::string   reason;      // what the step threw
    double        ms = 0.0;

    std::vector<phase_step_record> steps; // in the order they ran, undos included
};

// counts the runs of every step and says which one has to fail
class phase_faults {
  public:
    explicit phase_faults(std::vector<phase_fault> faults = {}) : faults(std::move(faults)) {}

    // true when this run of the step is one that has to fail; counts the run
    bool fires(const std::string & step);

    // Throws std::runtime_error when this run of the step has to fail; counts the run.
    void pass_or_throw(const std::string & step);

  private:
    std::vector<phase_fault>        faults;
    std::map<std::string, uint64_t> runs;
};

using phase_clock = std::function<double()>; // milliseconds, monotonic

phase_report phase_transaction_run(const std::vector<phase_step> & steps, phase_faults & faults, const phase_clock & clock);
