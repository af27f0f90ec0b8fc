// Where K/V goes: every mode over every fact that forbids it.

#include "check.h"
#include "kv-op.h"
#include "kv-place.h"

#include <string>

static phase_kv_facts good(bool sparse = true) {
    phase_kv_facts facts;
    facts.sparse = sparse;
    facts.f16 = facts.flash = facts.capable = facts.known_free = true;
    facts.sparse_bytes = 100;
    facts.dense_bytes  = 25000000000;
    facts.free_bytes   = 1000;
    return facts;
}

TEST(modes) {
    CHECK(!phase_kv_choose(PHASE_KV_DEVICE, good()).host);
    CHECK( phase_kv_choose(PHASE_KV_HOST, good()).host);
    CHECK( phase_kv_choose(PHASE_KV_HOST_ALL, good(false)).host);
    CHECK(phase_kv_choose(PHASE_KV_HOST, good()).reason.empty());

    const auto dense = phase_kv_choose(PHASE_KV_HOST, good(false));
    CHECK(!dense.host);
    CHECK(dense.reason.find("at most 1.0 tok/s") != std::string::npos);
    CHECK(dense.reason.find("indexer") == std::string::npos);

    auto other = good(false);
    other.indexer = true;
    CHECK(phase_kv_choose(PHASE_KV_HOST, other).reason.find("only qwen4exp") != std::string::npos);
    CHECK(phase_kv_choose(PHASE_KV_HOST_ALL, other).host);
}

TEST(auto_turns_at_half_of_what_is_free) {
    auto facts = good();
    facts.sparse_bytes = 500;
    CHECK(!phase_kv_choose(PHASE_KV_AUTO, facts).host);
    facts.sparse_bytes = 501;
    CHECK(phase_kv_choose(PHASE_KV_AUTO, facts).host);
    CHECK(!phase_kv_choose(PHASE_KV_AUTO, facts).reason.empty());
    facts.known_free = false; // a context that only measures
    CHECK(!phase_kv_choose(PHASE_KV_AUTO, facts).host);
    facts = good(false);
    facts.free_bytes = 0;
    CHECK(!phase_kv_choose(PHASE_KV_AUTO, facts).host);
    CHECK(phase_kv_choose(PHASE_KV_AUTO, facts).reason.empty());
}

TEST(every_obstacle_is_named) {
    for (const auto mode : { PHASE_KV_HOST, PHASE_KV_HOST_ALL, PHASE_KV_AUTO }) {
        for (bool phase_kv_facts::*obstacle : { &phase_kv_facts::f16, &phase_kv_facts::flash, &phase_kv_facts::capable }) {
            auto facts = good();
            facts.free_bytes  = 0;
            facts.*obstacle   = false;
            const auto choice = phase_kv_choose(mode, facts);
            CHECK(!choice.host);
            CHECK(!choice.reason.empty());
        }
    }
}

TEST(rows_on_the_device) {
    const uint64_t much = 32*16384000 - 1; // a thousand bytes a position: a 32nd is short of 16384 of them by a byte
    CHECK(phase_kv_rows_choose(0, 100000, 1000, much) == 0);
    CHECK(phase_kv_rows_choose(5000, 100000, 1000, 0) == 5000);
    CHECK(phase_kv_rows_choose(5000, 1000, 1000, 0) == 1000);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, much) == PHASE_KV_ROWS_AUTO);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, 2*much) == PHASE_KV_ROWS_AUTO);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, 2*much + 2) == 2*PHASE_KV_ROWS_AUTO);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, 100*much) == 100000);
    CHECK(phase_kv_rows_choose(-1, 1000, 1000, much) == 1000);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, 8*5000*1000) == 5000);
    CHECK(phase_kv_rows_choose(-1, 100000, 1000, 8*(PHASE_KV_ROWS_LEAST - 1)*1000) == 0);
    CHECK(phase_kv_rows_choose(-1, 1000, 1000, 8*999*1000) == 0);
}

TEST(names) {
    CHECK( phase_kv_is_host_name("CUDA0_KV_Host"));
    CHECK(!phase_kv_is_host_name("CUDA0"));
    CHECK(!phase_kv_is_host_name("CUDA_Host"));
    CHECK(!phase_kv_is_host_name("_KV_Host"));
}

TEST_MAIN("test-kv-place")
