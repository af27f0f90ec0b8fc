// phase-ubatch: the candidates of LLAMA_PHASE_PREFILL_UBATCH=auto and the choice among them.

#include "check.h"

#include "phase-ubatch.h"

#include <algorithm>
#include <cstdint>

namespace {

using list = std::vector<uint32_t>;

// with a ring of 100 bytes and pools of 10
phase_ubatch_candidate candidate(uint32_t ubatch, size_t compute, size_t free, size_t budget = SIZE_MAX) {
    phase_ubatch_candidate out;
    out.ubatch = ubatch;
    out.devices.push_back({ "CUDA0", compute, 100, 10, free, budget });
    return out;
}

} // namespace

TEST(candidates_are_above_decode_and_within_the_batch) {
    CHECK((phase_ubatch_candidates(126, 100000) == list { 512, 1024, 2048, 4096, 8192 }));
    CHECK((phase_ubatch_candidates(512, 8192)   == list { 1024, 2048, 4096, 8192 }));
    CHECK((phase_ubatch_candidates(512, 3000)   == list { 1024, 2048, 3000 }));
    CHECK((phase_ubatch_candidates(512, 2048)   == list { 1024, 2048 }));
    CHECK((phase_ubatch_candidates(126, 300)    == list { 300 }));
    CHECK((phase_ubatch_candidates(512, 512)    == list {}));
    CHECK((phase_ubatch_candidates(8192, 16384) == list {}));
}

TEST(candidates_ascend_for_any_sizes) {
    for (uint32_t decode = 1; decode < 9000; decode += 37) {
        for (uint32_t batch = 1; batch < 9000; batch += 41) {
            const auto found = phase_ubatch_candidates(decode, batch);
            CHECK(std::is_sorted(found.begin(), found.end()));
            CHECK(std::adjacent_find(found.begin(), found.end()) == found.end());
            CHECK(std::all_of(found.begin(), found.end(), [&](uint32_t n) { return n > decode && n <= batch; }));
            CHECK(found.empty() == (batch <= decode || decode >= 8192));
        }
    }
}

TEST(the_largest_that_fits) {
    CHECK_EQ(phase_ubatch_choose({ candidate(1024, 100, 1000), candidate(2048, 890, 1000), candidate(4096, 891, 1000) }, 512), 2048u);
    CHECK_EQ(phase_ubatch_choose({ candidate(1024, 900, 1000), candidate(2048, 10, 1000) }, 512), 2048u);
    CHECK_EQ(phase_ubatch_choose({ candidate(1024, 900, 1000) }, 512), 512u);
    CHECK_EQ(phase_ubatch_choose({}, 512), 512u);
    CHECK_EQ(phase_ubatch_choose({ candidate(1024, SIZE_MAX/2, SIZE_MAX) }, 512), 1024u);
}

TEST(pools_do_not_count_against_a_budget) {
    CHECK(candidate(1024, 900, SIZE_MAX, 1000).fits());
    CHECK(!candidate(1024, 901, SIZE_MAX, 1000).fits());
    CHECK_EQ(candidate(1024, 950, SIZE_MAX, 1000).devices[0].short_bytes(), size_t(50));
    CHECK_EQ(candidate(1024, 950, 1000).devices[0].short_bytes(), size_t(60));
    CHECK_EQ(candidate(1024, 950, 1040, 1000).devices[0].short_bytes(), size_t(50));
    CHECK_EQ(candidate(1024, 950, 900, 1000).devices[0].short_bytes(), size_t(160));
}

TEST(one_device_is_enough_not_to_fit) {
    auto both = candidate(1024, 100, 1000);
    both.devices.push_back(candidate(1024, 1000, 1000).devices[0]);
    CHECK(!both.fits());
    CHECK_HAS(both.text(), "short by");
    auto failed = candidate(1024, 100, 1000);
    failed.failure = "no memory context";
    CHECK(!failed.fits());
    CHECK_HAS(failed.text(), "no memory context");
}

TEST(a_follow_up_never_switches_and_a_switch_saves_a_micro_batch) {
    for (uint32_t ubatch = 1; ubatch < 5000; ++ubatch) {
        const uint32_t least = phase_min_tokens(ubatch);
        CHECK(least > 200);
        CHECK((least + ubatch - 1)/ubatch >= 2);
    }
    CHECK_EQ(phase_min_tokens(512), 640u);
}

TEST_MAIN("test-phase-ubatch")
