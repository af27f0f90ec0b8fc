#pragma once

// For the programs of this folder: main() returns 1 when a condition does not hold, and says which.

#include <cstdio>

#define EXPECT(condition)                                                \
    do {                                                                 \
        if (!(condition)) {                                              \
            std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            return 1;                                                    \
        }                                                                \
    } while (0)
