// What is said about memory that cannot be pinned.

#include "pin-advice.h"

#include "check.h"

static constexpr uint64_t MIB = 1 << 20;
static constexpr uint64_t GIB = 1024*MIB;

TEST(memlock) {
    CHECK_EQ(phase_memlock_advice(PHASE_NO_LIMIT, 60*GIB), "");

    // also when each piece of memory is below it
    const auto text = phase_memlock_advice(8*GIB, 60*GIB);
    for (const char * part : { "; this process may lock 8192.0 MiB", "all experts need 61440 MiB", "ulimit -l unlimited", "LimitMEMLOCK=infinity" }) {
        CHECK(text.find(part) != std::string::npos);
    }
    CHECK(phase_memlock_advice(64 << 10, GIB).find("0.1 MiB") != std::string::npos);
    CHECK(!phase_memlock_advice(61*GIB, 60*GIB).empty()); // others lock memory, too
    CHECK(!phase_memlock_advice(0, GIB).empty());
}

TEST(refusal) {
    CHECK_EQ(phase_pin_refusal(GIB, 3*GIB, 2*GIB), "");
    CHECK_EQ(phase_pin_refusal(GIB, 0, 2*GIB), ""); // unknown
    const auto text = phase_pin_refusal(GIB, 3*GIB - MIB, 2*GIB);
    CHECK_EQ(text, "3071 MiB of memory are available and 2048 MiB have to stay so");
    CHECK(!phase_pin_refusal(UINT64_MAX/2, GIB, GIB).empty());
}

TEST_MAIN("test-pin-advice")
