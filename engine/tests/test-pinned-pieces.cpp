// Where a copy from host memory has to be cut.

#include "pinned-pieces.h"

#include "check.h"

#include <random>
#include <vector>

static const void * at(uintptr_t address) {
    return (const void *) address;
}

TEST(borders) {
    phase_pinned_pieces pieces;
    CHECK_EQ(pieces.run(at(5), 100), 100u);
    pieces.add(at(10), 10);
    pieces.add(at(20), 5); // touches
    pieces.add(at(40), 1);
    CHECK_EQ(pieces.run(at(5), 100), 5u);
    CHECK_EQ(pieces.run(at(10), 100), 10u);
    CHECK_EQ(pieces.run(at(19), 100), 1u);
    CHECK_EQ(pieces.run(at(20), 100), 5u);
    CHECK_EQ(pieces.run(at(20), 3), 3u);
    CHECK_EQ(pieces.run(at(25), 100), 15u);
    CHECK_EQ(pieces.run(at(41), 100), 100u);
    CHECK_EQ(pieces.run(at(12), 0), 0u);
    pieces.remove(at(20));
    CHECK_EQ(pieces.run(at(20), 100), 20u);
}

// Runs cover what is asked for, and none has a border inside.
TEST(any_pieces) {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        phase_pinned_pieces pieces;
        std::vector<int>    piece_of(300, 0);
        int next = (int) (random() % 20);
        for (int id = 1; next < 280; ++id) {
            const int size = 1 + (int) (random() % 20);
            pieces.add(at(1000 + next), size);
            std::fill(piece_of.begin() + next, piece_of.begin() + std::min(next + size, 300), id);
            next += size + (int) (random() % 2*(random() % 20));
        }
        for (int begin = 0; begin < 300; begin += 1 + (int) (random() % 7)) {
            for (int done = begin; done < 300; ) {
                const int n = (int) pieces.run(at(1000 + done), 300 - done);
                CHECK(n > 0 && done + n <= 300);
                for (int i = done; i < done + n; ++i) {
                    CHECK_EQ(piece_of[i], piece_of[done]);
                }
                CHECK(done + n == 300 || piece_of[done + n] != piece_of[done]);
                done += n;
            }
        }
    }
}

TEST_MAIN("test-pinned-pieces")
