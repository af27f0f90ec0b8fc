// slot-count: what a target and a draft get, by what is asked for and what fits.

#include "check.h"

#include "slot-count.h"

#include <stdexcept>

namespace {

constexpr int32_t AUTO = -1;

slot_bounds bounds(int32_t fits) {
    return { 8, 32, fits, "GPU has room for so much" };
}

int32_t of_target(int32_t fits, int32_t expert_slots, int32_t draft_slots = AUTO) {
    const auto count = choose_slots(bounds(fits), expert_slots, draft_slots, false, 2);
    CHECK(count.why_not_all.empty());
    return count.n;
}

slot_count of_draft(int32_t fits, int32_t expert_slots, int32_t draft_slots = AUTO) {
    return choose_slots(bounds(fits), expert_slots, draft_slots, true, 2);
}

std::string refusal(int32_t fits, int32_t expert_slots, int32_t draft_slots, bool draft) {
    return check::thrown<std::runtime_error>([&] { choose_slots(bounds(fits), expert_slots, draft_slots, draft, 2); });
}

} // namespace

TEST(a_target_has_what_it_asks_for_or_what_fits) {
    CHECK_EQ(of_target(32, 16), 16);
    CHECK_EQ(of_target(32, 100), 32);
    CHECK_EQ(of_target(20, AUTO), 20);
    CHECK_EQ(of_target(20, 16, 8), 16); // the draft's number is none of its business
}

TEST(a_draft_has_all_when_they_fit) {
    for (const int32_t expert_slots : { AUTO, 8, 32 }) {
        CHECK_EQ(of_draft(32, expert_slots).n, 32);
        CHECK(of_draft(32, expert_slots).why_not_all.empty());
    }
}

TEST(a_draft_whose_experts_do_not_all_fit_has_what_the_target_asks_for) {
    CHECK_EQ(of_draft(31, 16).n, 16);
    CHECK_EQ(of_draft(31, AUTO).n, 31);
    const auto why = of_draft(31, 16).why_not_all;
    CHECK_HAS(why, "16 slots for 32 experts: GPU has room for so much");
    CHECK_HAS(refusal(15, 16, AUTO, true), "16 slots do not fit for the draft: GPU has room for so much, so at most 15 fit and at least 8 are needed");
}

TEST(a_draft_has_the_number_it_was_given) {
    for (const int32_t fits : { 8, 31, 32 }) {
        CHECK_EQ(of_draft(fits, 16, 8).n, 8);
        CHECK_HAS(of_draft(fits, 16, 8).why_not_all, "8 slots for 32 experts: LLAMA_PHASE_DRAFT_SLOTS=8");
    }
    CHECK_EQ(of_draft(32, 16, 100).n, 32);
    CHECK(of_draft(32, 16, 100).why_not_all.empty());
    CHECK_HAS(refusal(32, 16, 7, true), "LLAMA_PHASE_DRAFT_SLOTS=7 is too few: 8 are needed (experts per token x LLAMA_PHASE_EXPERT_BATCH=2)");
    CHECK_HAS(refusal(31, 16, 100, true), "32 slots do not fit for the draft");
}

TEST(too_few_and_too_many_are_refused_with_the_number) {
    CHECK_HAS(refusal(32, 7, AUTO, false), "LLAMA_PHASE_EXPERT_SLOTS=7 is too few: 8 are needed");
    CHECK_HAS(refusal(15, 16, AUTO, false), "16 slots do not fit: GPU has room for so much, so at most 15 fit");
    CHECK_HAS(refusal(7, AUTO, AUTO, false), "8 slots do not fit");
    CHECK_HAS(refusal(7, AUTO, AUTO, true), "8 slots do not fit for the draft");
}

TEST_MAIN("test-slot-count")
