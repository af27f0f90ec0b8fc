#pragma once

// How many tokens to draft for a sequence (0 included), from what was measured. Pure: times, acceptances and events in, a depth out;
// the same calls give the same depths.
//
// A round of generation drafts for every sequence, then verifies all drafts in one batch. With depth k for one sequence it yields
//
//   1 + a1 + a1*a2 + ... + a1*...*ak   tokens, a_i: acceptance of position i when all before it were accepted
//
// and takes draft(k) + verify(tokens in the batch) milliseconds. The depth with the most tokens per millisecond wins, the other
// sequences' depths given. A change needs a gain (hysteresis), and now and then another depth is tried for a few rounds, so
// that times and acceptances that changed are noticed, at depth 0 too: the one that would be best if each took as little as may be.
//
// Single rounds are disturbed (a thread that is late, a graph that is captured), which only adds, so of a size's last rounds the longest are
// left out. The others differ, too, by what is missed of the experts: their mean is what counts. Sizes are held against each other:
// draft_cost. Times drift, too (expert slots that fill, a context that grows), by more than depths differ: the first ones are tried in
// turn, and what was measured long ago counts less than the line through what is new.
//
// Events of a sequence: prompt, begin (its prompt is done), end. Events of a round: choose() for each sequence, drafted(),
// verified() for each draft; the next round's first choose() ends it. Rounds that shared their batch with a prompt, or in which
// sequences came or went, are not measured.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

inline constexpr int32_t DRAFT_DEPTH_MAX = 63; // deeper drafts are not considered

// Milliseconds by size: the mean of its last rounds without the longest, that of few or old rounds mixed with a line through all sizes, and
// never more than that of a larger size. Sizes that were not measured lie on the line, between those that were.
class draft_cost {
  public:
    struct entry {
        double   ms = 0.0;
        uint32_t n  = 0; // rounds it is from

        double                                  mean = 0.0;
        std::deque<std::pair<uint64_t, double>> last; // round, ms
    };

    // `proportional`: the line goes through 0
    explicit draft_cost(bool proportional = false) : proportional(proportional) {}

    void   add(int32_t size, double ms, uint64_t round); // rounds only grow; a size's old ones end
    double at(int32_t size) const;    // 0 when nothing was measured
    double doubt(int32_t size) const; // how much less it may be, as a part: more where few rounds are known, or old ones

    const std::map<int32_t, entry> & entries() const { return sizes; }

  private:
    void   fit();
    double weight(const entry & e) const; // rounds that it is worth
    double line(int32_t size) const { return origin_ms + slope_ms*(size - origin); }

    const bool               proportional;
    std::map<int32_t, entry> sizes;
    uint64_t                 now       = 0; // the last round
    double                   origin    = 0.0;
    double                   origin_ms = 0.0;
    double                   slope_ms  = 0.0;
};

// Moving acceptance rates by position, counted from 0.
class draft_acceptance {
  public:
    explicit draft_acceptance(double window) : window(window) {} // trials

    void add(int32_t n_drafted, int32_t n_accepted);
    void fade(); // the next trials count for much

    // of `position` when all before it were accepted; positions with few trials lean on `prior`, then on the position before
    double rate(size_t position, const draft_acceptance * prior = nullptr) const;

    // tokens of a round at `depth`, the target's own included
    double expected(int32_t depth, const draft_acceptance * prior = nullptr) const;

    size_t size() const { return positions.size(); }

  private:
    struct counts {
        double trials = 0.0;
        double hits   = 0.0;
    };
    double              window;
    std::vector<counts> positions;
};

struct draft_stats {
    bool                  active = false;
    int32_t               max_batch = 0; // tokens of a verify batch, all sequences
    std::vector<uint64_t> rounds;        // chosen, by depth
    uint64_t              n_changes  = 0;
    uint64_t              n_probes   = 0;
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
        int32_t          home  = -1; // what a probe returns to; -1: not known yet
        uint32_t         n_since_change = 0; // rounds
        uint32_t         n_since_probe  = 0;
        uint32_t         probe_every    = 0; // 0: not set yet
        uint32_t         probe_left     = 0;
        draft_acceptance acceptance { 128 };
    };

    struct round {
        double                     begin_ms = 0.0;
        double                     draft_ms = 0.0;
        bool                       choosing = false; // between the first choose() and drafted()
        bool                       disturbed = true;
        std::map<int32_t, int32_t> tokens; // by sequence: 1 + drafted
        std::map<int32_t, int32_t> depths;
    };

    void    close_round(double now_ms);
    int32_t decide(int32_t seq, sequence & s, int32_t cap, bool may_explore);
    int32_t unexplored(int32_t cap) const;
    int32_t best(int32_t seq, const sequence & s, int32_t cap) const;
    int32_t promising(int32_t seq, const sequence & s, int32_t cap) const;
    double  score(int32_t seq, const sequence & s, int32_t depth, bool hopeful = false) const;
    void    set_depth(sequence & s, int32_t depth);

    const int32_t max_batch;

    std::map<int32_t, sequence> sequences; // that generate
    std::set<int32_t>           prompts;   // sequences whose prompt is in progress
    std::map<int32_t, uint32_t> visits;    // by depth: rounds of it while depths are tried in turn
    sequence                    last;      // the one that ended last leaves its depth and the schedule of probes to the next
    round                       current;

    draft_cost       verify;
    draft_cost       draft { true };
    draft_acceptance acceptance { 512 }; // of all sequences
    uint64_t         n_rounds = 0; // measured
    draft_stats      counters;
};
