#pragma once

// How many tokens to draft for a sequence (0 included), from what was measured. Pure: times, acceptances and events in, a depth out;
// the same calls give the same depths.
//
// A round of generation drafts for every sequence, then verifies all drafts in one batch. With depth k for one sequence it yields
//
//   1 + a1 + a1*a2 + ... + a1*...*ak   tokens, a_i: acceptance of position i when all before it were accepted
//
// and takes draft(k) + verify(tokens in the batch) milliseconds. What is known of acceptances and times is a mean and how far it may be off:
// more where little was seen, or long ago. Every few rounds all of them are drawn from what they may be, and the depths with the most
// tokens per millisecond by that draw are used: another depth is tried as often as it may be the better one. The first plans, and a few
// others, are tries.
//
// Events of a sequence: prompt, begin (its prompt is done), end. Events of a round: choose() for each sequence, drafted(),
// verified() for each draft; the next round's first choose() ends it. Rounds that shared their batch with a prompt, or in which
// sequences came or went, are not measured.

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

inline constexpr int32_t DRAFT_DEPTH_MAX = 63; // deeper drafts are not considered

// Milliseconds by size. Logarithms of times are jointly normal, and each round's time updates them all (a Kalman filter): before anything
// is measured they are on a power of the size, from which they may stray the more the further sizes are apart, and with each round they may all
// have moved by the same factor. So a size that was not measured lies between its neighbours, and what was measured long ago, while expert
// slots were cold, moves with what is measured now.
class draft_cost {
  public:
    struct entry {
        double   ms = 0.0;
        uint32_t n  = 0; // rounds of this size
    };

    // times are expected to grow as this power of the size; `stray`: how far logarithms of times stray from that at e times the size
    draft_cost(int32_t n_sizes, double power, double stray);

    void   pass(); // a round has passed
    void   add(int32_t size, double ms);
    double at(int32_t size) const; // 0 when nothing was measured

    // a draw of all sizes' milliseconds, [0] is 0; `spread` of 0: the means
    std::vector<double> draw(double spread, std::mt19937 & random) const;

    std::map<int32_t, entry> entries() const; // sizes that were measured

  private:
    using matrix = std::vector<std::vector<double>>;

    const double          power;
    const matrix          first; // covariance before anything is measured
    bool                  measured = false;
    std::vector<double>   mean;  // of log(ms), by size - 1
    matrix                covariance;
    std::vector<uint32_t> n;     // rounds
};

// Acceptance rates by position, counted from 0. What was seen counts half after a while.
class draft_acceptance {
  public:
    void pass(); // a round has passed
    void add(int32_t n_drafted, int32_t n_accepted);

    // of `position` when all before it were accepted
    double rate(size_t position) const { return belief_of(position, nullptr).rate; }

    // a draw of the tokens that each position up to `depth` adds to a round; `spread` of 0: the means
    std::vector<double> draw(int32_t depth, const draft_acceptance & prior, double spread, std::mt19937 & random) const;

    size_t size() const { return positions.size(); }

  private:
    struct counts {
        double trials = 0.0;
        double hits   = 0.0;
    };
    struct belief {
        double rate;
        double trials; // that it is worth
    };
    // positions with few trials lean on `prior`, or without one on the position before
    belief belief_of(size_t position, const draft_acceptance * prior) const;

    std::vector<counts> positions;
};

struct draft_stats {
    bool                  active = false;
    int32_t               max_batch = 0; // tokens of a verify batch, all sequences
    std::vector<uint64_t> rounds;        // chosen, by depth
    uint64_t              n_changes  = 0;
    uint64_t              n_probes   = 0; // plans that were not the best by what was known
    uint64_t              n_drafted  = 0; // tokens
    uint64_t              n_accepted = 0;
    std::vector<double>   acceptance;     // by position

    std::map<int32_t, int32_t>           depths;    // by sequence, now
    std::map<int32_t, draft_cost::entry> verify_ms; // by tokens in the batch
    std::map<int32_t, draft_cost::entry> draft_ms;  // by depth
};

class draft_depth {
  public:
    // `max_batch`: most tokens of a verify batch, all sequences together
    explicit draft_depth(int32_t max_batch);

    void prompt(int32_t seq);
    void begin(int32_t seq);
    void end(int32_t seq);

    // The depth for `seq` in this round: at most `limit` (what fits its context), `max_depth` (what the drafter can do), and
    // its share of the batch. `now_ms` is monotonic.
    int32_t choose(int32_t seq, int32_t limit, int32_t max_depth, double now_ms);
    void    drafted(double now_ms);
    void    disturbed() { current.disturbed = true; } // this round does something else as well: its time is not measured
    void    verified(int32_t seq, int32_t n_drafted, int32_t n_accepted);

    // sequences generate, and no prompt is in progress
    bool generating() const { return !sequences.empty() && prompts.empty(); }

    draft_stats stats() const;

  private:
    struct sequence {
        int32_t          depth = -1; // -1: not chosen yet
        int32_t          cap   = 0;
        uint32_t         n_since_change = 0; // rounds
        draft_acceptance acceptance;
    };

    using depths = std::map<int32_t, int32_t>; // by sequence

    struct round {
        double                     begin_ms = 0.0;
        double                     draft_ms = 0.0;
        bool                       choosing = false; // between the first choose() and drafted()
        bool                       disturbed = true;
        depths                     tokens; // 1 + drafted
        depths                     chosen;
    };

    void   close_round(double now_ms);
    depths plan(); // for the sequences that generate now
    depths best(double spread); // by a draw; 0: by the means

    const int32_t max_batch;

    std::map<int32_t, sequence> sequences; // that generate
    std::set<int32_t>           prompts;   // sequences whose prompt is in progress
    round                       current;
    depths                      planned;
    uint64_t                    n_plans   = 0;
    uint32_t                    n_left    = 0; // rounds of this plan
    std::mt19937                random { 1 };

    draft_cost       verify;
    draft_cost       draft;
    draft_acceptance acceptance; // of all sequences
    draft_stats      counters;
};
