#pragma once

// Checks for the programs of this folder. A program is cases and TEST_MAIN(); it prints what failed and "N passed, N failed", counting
// cases, and exits with 1 when one failed. A failed REQUIRE ends its case, a failed CHECK does not.

#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct stop_case {};

inline std::vector<std::pair<const char *, void (*)()>> & cases() {
    static std::vector<std::pair<const char *, void (*)()>> list;
    return list;
}

inline int & failures() {
    static int n = 0;
    return n;
}

struct registration {
    registration(const char * name, void (*run)()) { cases().emplace_back(name, run); }
};

inline bool report(bool ok, const char * file, int line, const std::string & text) {
    if (!ok) {
        ++failures();
        std::printf("%s:%d: %s\n", file, line, text.c_str());
    }
    return ok;
}

template <typename A, typename B>
bool equal(const A & a, const B & b, const char * file, int line, const char * text) {
    if (a == b) {
        return true;
    }
    std::ostringstream out;
    out << text << " (" << a << " and " << b << ")";
    return report(false, file, line, out.str());
}

// what `run` threw, or "" when it threw nothing
template <typename E>
std::string thrown(const std::function<void()> & run) {
    try {
        run();
    } catch (const E & error) {
        return error.what();
    }
    return "";
}

inline bool has(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

inline int run_all(const char * program) {
    int passed = 0;
    int failed = 0;
    for (const auto & [name, run] : cases()) {
        const int before = failures();
        try {
            run();
        } catch (const stop_case &) {
        } catch (const std::exception & error) {
            report(false, program, 0, std::string("exception: ") + error.what());
        }
        const bool ok = failures() == before;
        ++(ok ? passed : failed);
        if (!ok) {
            std::printf("FAILED: %s\n", name);
        }
    }
    std::printf("%s: %d passed, %d failed\n", program, passed, failed);
    return failed ? 1 : 0;
}

} // namespace check

#define TEST(name)                                                    \
    static void                test_##name();                         \
    static check::registration registered_##name(#name, test_##name); \
    static void                test_##name()

#define CHECK(condition)    check::report((condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b)      check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_HAS(text, part) check::report(check::has((text), (part)), __FILE__, __LINE__, std::string("'") + (part) + "' in: " + (text))
#define REQUIRE(condition)  do { if (!CHECK(condition)) { throw check::stop_case(); } } while (0)

#define TEST_MAIN(program) int main() { return check::run_all(program); }
