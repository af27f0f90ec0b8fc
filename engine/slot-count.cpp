#include "slot-count.h"

#include <algorithm>
#include <stdexcept>

slot_count choose_slots(const slot_bounds & bounds, int32_t expert_slots, int32_t draft_slots, bool draft, uint32_t expert_batch) {
    const bool own   = draft && draft_slots >= 0;
    int32_t    asked = own ? draft_slots : expert_slots;
    if (draft && !own && bounds.fits >= bounds.all) {
        asked = bounds.all;
    }
    const int32_t n = asked < 0 ? bounds.fits : std::min(asked, bounds.all);

    const std::string variable = own ? "LLAMA_PHASE_DRAFT_SLOTS" : "LLAMA_PHASE_EXPERT_SLOTS";
    if (n < bounds.needed && asked >= 0) {
        throw std::runtime_error("llama-phase: " + variable + "=" + std::to_string(asked) + " is too few: " + std::to_string(bounds.needed) +
                " are needed (experts per token x LLAMA_PHASE_EXPERT_BATCH=" + std::to_string(expert_batch) + ")");
    }
    if (n > bounds.fits || n < bounds.needed) {
        throw std::runtime_error("llama-phase: " + std::to_string(std::max(n, bounds.needed)) + " slots do not fit" + (draft ? " for the draft" : "") + ": " +
                bounds.room + ", so at most " + std::to_string(bounds.fits) + " fit and at least " + std::to_string(bounds.needed) + " are needed");
    }

    slot_count count = { n, "" };
    if (draft && n < bounds.all) {
        count.why_not_all = "the draft has " + std::to_string(n) + " slots for " + std::to_string(bounds.all) + " experts: " +
            (own ? variable + "=" + std::to_string(draft_slots) : bounds.room);
    }
    return count;
}
