#pragma once

// Names of the steps of a transaction. LLAMA_PHASE_FAULT, logs, /phase and the C API use them.

#define PHASE_STEP_ENTER_QUIESCE         "enter.quiesce"
#define PHASE_STEP_ENTER_REMEMBER        "enter.remember_slots"
#define PHASE_STEP_ENTER_DROP_DECODE     "enter.drop_decode_buffers"
#define PHASE_STEP_ENTER_FREE_SLOTS      "enter.free_slots"
#define PHASE_STEP_ENTER_ALLOCATE_RING   "enter.allocate_ring"
#define PHASE_STEP_ENTER_RESERVE_PREFILL "enter.reserve_prefill_buffers"
#define PHASE_STEP_UNDO_DROP_PREFILL     "undo.drop_prefill_buffers"
#define PHASE_STEP_UNDO_FREE_RING        "undo.free_ring"
#define PHASE_STEP_UNDO_ALLOCATE_SLOTS   "undo.allocate_slots"
#define PHASE_STEP_UNDO_RESERVE_DECODE   "undo.reserve_decode_buffers"
#define PHASE_STEP_LEAVE_QUIESCE         "leave.quiesce"
#define PHASE_STEP_LEAVE_DROP_PREFILL    "leave.drop_prefill_buffers"
#define PHASE_STEP_LEAVE_FREE_RING       "leave.free_ring"
#define PHASE_STEP_LEAVE_ALLOCATE_SLOTS  "leave.allocate_slots"
#define PHASE_STEP_LEAVE_RESERVE_DECODE  "leave.reserve_decode_buffers"
#define PHASE_STEP_LEAVE_REFILL          "leave.refill_slots"
#define PHASE_STEP_LEAVE_RETRY_DECODE    "leave.retry_decode_buffers"

// not steps, but attempts inside a step that has fallbacks
#define PHASE_STEP_SLOTS_ALLOCATE        "slots.allocate"
#define PHASE_STEP_RING_ALLOCATE         "ring.allocate"
#define PHASE_STEP_RING_START            "ring.start" // once for each device; no fallback, the step fails
#define PHASE_STEP_KV_ALLOCATE           "kv.allocate" // while a context is made, outside any transaction

// at start, once for each piece of memory (on the CPU, which pins nothing, for each layer); for each layer that is copied instead; and for
// the memory of a staging ring
#define PHASE_STEP_PIN_REGISTER          "pin.register"
#define PHASE_STEP_PIN_COPY              "pin.copy"
#define PHASE_STEP_PIN_STAGING           "pin.staging"

inline const char * const PHASE_STEPS[] = {
    PHASE_STEP_ENTER_QUIESCE,
    PHASE_STEP_ENTER_REMEMBER,
    PHASE_STEP_ENTER_DROP_DECODE,
    PHASE_STEP_ENTER_FREE_SLOTS,
    PHASE_STEP_ENTER_ALLOCATE_RING,
    PHASE_STEP_ENTER_RESERVE_PREFILL,
    PHASE_STEP_UNDO_DROP_PREFILL,
    PHASE_STEP_UNDO_FREE_RING,
    PHASE_STEP_UNDO_ALLOCATE_SLOTS,
    PHASE_STEP_UNDO_RESERVE_DECODE,
    PHASE_STEP_LEAVE_QUIESCE,
    PHASE_STEP_LEAVE_DROP_PREFILL,
    PHASE_STEP_LEAVE_FREE_RING,
    PHASE_STEP_LEAVE_ALLOCATE_SLOTS,
    PHASE_STEP_LEAVE_RESERVE_DECODE,
    PHASE_STEP_LEAVE_REFILL,
    PHASE_STEP_LEAVE_RETRY_DECODE,
    PHASE_STEP_SLOTS_ALLOCATE,
    PHASE_STEP_RING_ALLOCATE,
    PHASE_STEP_RING_START,
    PHASE_STEP_PIN_REGISTER,
    PHASE_STEP_PIN_COPY,
    PHASE_STEP_PIN_STAGING,
    PHASE_STEP_KV_ALLOCATE,
};
