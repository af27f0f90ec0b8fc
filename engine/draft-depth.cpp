#include "draft-depth.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

constexpr size_t   COST_ROUNDS    = 40;   // of a size that are kept
constexpr size_t   COST_DROPPED   = 6;    // one of so many, the longest, is left out
constexpr uint64_t COST_OLD       = 64;   // rounds, after which they end when newer ones come
constexpr uint64_t COST_AGE       = 128;  // rounds, after which they count half
constexpr double   LINE_ROUNDS    = 1;    // that the line through all sizes is worth
constexpr double   DOUBT          = 0.3;  // of its time, for one round; of n rounds it is that by their square root
constexpr double   DOUBT_LINE     = 8;    // rounds that the line is worth there
constexpr double   FADED_TRIALS   = 32;
constexpr double   PRIOR_WEIGHT   = 16;   // trials that a prior is worth
constexpr double   FIRST_RATE     = 0.7;  // of the first position, before anything is known
constexpr double   FIRST_WEIGHT   = 2;
constexpr uint32_t SETTLE_ROUNDS  = 1;    // after a change: a graph is planned
constexpr uint32_t EXPLORE_RUN    = SETTLE_ROUNDS + 4; // rounds of one depth while depths are tried in turn
constexpr uint32_t EXPLORE_ROUNDS = EXPLORE_RUN*2;     // of each; the first run captures, the second is warmer
constexpr double   EXPLORE_TOKENS = 1.2;  // of a round: depths that yield less are not tried in turn, whatever they take
constexpr uint32_t DECIDE_EVERY   = 8;    // rounds
constexpr double   GAIN           = 1.03; // what a change has to win
constexpr uint32_t PROBE_ROUNDS   = SETTLE_ROUNDS + 4;
constexpr uint32_t PROBE_FIRST    = 64;   // rounds; doubled by each probe that changed nothing
constexpr uint32_t PROBE_SELDOM   = 512;
constexpr uint64_t PROBES_OF_NONE = 3;    // one of so many, the first too, is without drafts: what they have to win over is not left to a line
constexpr uint32_t PROBE_NEXT     = 256;  // at most, for a new sequence's first
constexpr int32_t  EXPLORED[]     = { 3, 0, 1 }; // depths, tried in turn; deeper ones lie on the line through these until they are chosen

} // namespace

//
// cost
//

void draft_cost::add(int32_t size, double ms, uint64_t round) {
    auto & e = sizes[size];
    now = round;
    e.last.emplace_back(round, ms);
    while (e.last.size() > COST_ROUNDS || e.last.front().first + COST_OLD < round) {
        e.last.pop_front();
    }
    e.n = e.last.size();
    std::vector<double> sorted;
    for (const auto & [of, one] : e.last) {
        sorted.push_back(one);
    }
    std::sort(sorted.begin(), sorted.end());
    const size_t n = e.n - (e.n + COST_DROPPED - 1)/COST_DROPPED;
    e.mean = n ? std::accumulate(sorted.begin(), sorted.begin() + n, 0.0)/n : sorted[0];
    fit();
}

double draft_cost::weight(const entry & e) const {
    const double age = (double) (now - e.last.back().first)/COST_AGE;
    return e.n*std::exp2(-std::min(age, 20.0)); // never nothing: the line needs a second size
}

// Weighted least squares; then from the largest size down.
void draft_cost::fit() {
    double n = 0.0, x = 0.0, y = 0.0, xx = 0.0, xy = 0.0;
    for (const auto & [size, e] : sizes) {
        const double w = weight(e);
        n += w;
        x += w*size;
        y += w*e.mean;
    }
    origin    = proportional ? 0.0 : x/n;
    origin_ms = proportional ? 0.0 : y/n;
    for (const auto & [size, e] : sizes) {
        const double w = weight(e);
        xx += w*(size - origin)*(size - origin);
        xy += w*(size - origin)*(e.mean - origin_ms);
    }
    slope_ms = xx > 0.0 ? std::max(xy/xx, 0.0) : 0.0;

    double least = INFINITY;
    for (auto it = sizes.rbegin(); it != sizes.rend(); ++it) {
        auto & e = it->second;
        const double w = weight(e);
        least = e.ms = std::min(least, (w*e.mean + LINE_ROUNDS*line(it->first))/(w + LINE_ROUNDS));
    }
}

double draft_cost::doubt(int32_t size) const {
    const auto it = sizes.find(size);
    return DOUBT/std::sqrt(DOUBT_LINE + (it == sizes.end() ? 0.0 : weight(it->second)));
}

double draft_cost::at(int32_t size) const {
    const auto above = sizes.lower_bound(size);
    if (above != sizes.end() && above->first == size) {
        return above->second.ms;
    }
    const double least = above == sizes.begin() ? 0.0      : std::prev(above)->second.ms;
    const double most  = above == sizes.end()   ? INFINITY : above->second.ms;
    return sizes.empty() ? 0.0 : std::min(std::max(line(size), least), most);
}

//
// acceptance
//

void draft_acceptance::add(int32_t n_drafted, int32_t n_accepted) {
    const size_t n_tried = (size_t) std::min(n_drafted, n_accepted + 1);
    if (positions.size() < n_tried) {
        positions.resize(n_tried);
    }
    for (size_t i = 0; i < n_tried; ++i) {
        auto & p = positions[i];
        const double keep = p.trials >= window ? 1.0 - 1.0/window : 1.0;
        p.trials = p.trials*keep + 1.0;
        p.hits   = p.hits*keep + ((int32_t) i < n_accepted ? 1.0 : 0.0);
    }
}

void draft_acceptance::fade() {
    for (auto & p : positions) {
        const double scale = p.trials > FADED_TRIALS ? FADED_TRIALS/p.trials : 1.0;
        p.trials *= scale;
        p.hits   *= scale;
    }
}

double draft_acceptance::rate(size_t position, const draft_acceptance * prior) const {
    double lean   = FIRST_RATE;
    double weight = FIRST_WEIGHT;
    if (prior || position > 0) {
        lean   = prior ? prior->rate(position) : rate(position - 1);
        weight = PRIOR_WEIGHT;
    }
    const counts p = position < positions.size() ? positions[position] : counts();
    return (p.hits + weight*lean)/(p.trials + weight);
}

double draft_acceptance::expected(int32_t depth, const draft_acceptance * prior) const {
    double tokens  = 1.0;
    double reached = 1.0;
    for (int32_t i = 0; i < depth; ++i) {
        reached *= rate(i, prior);
        tokens  += reached;
    }
    return tokens;
}

//
// events
//

draft_depth::draft_depth(int32_t max_batch) : max_batch(max_batch) {
    counters.active    = true;
    counters.max_batch = max_batch;
}

void draft_depth::prompt(int32_t seq) {
    prompts.insert(seq);
    sequences.erase(seq);
    current.disturbed = true;
}

void draft_depth::begin(int32_t seq) {
    prompts.erase(seq);
    sequence s;
    s.home          = last.home;
    s.n_since_probe = last.n_since_probe;
    s.probe_every   = std::min(last.probe_every, PROBE_NEXT); // its text may be another one
    sequences[seq]  = s;
    current.disturbed = true;
}

void draft_depth::end(int32_t seq) {
    prompts.erase(seq);
    if (const auto it = sequences.find(seq); it != sequences.end()) {
        last = it->second.home >= 0 ? it->second : last;
        sequences.erase(it);
    }
    current.disturbed = true;
}

int32_t draft_depth::choose(int32_t seq, int32_t limit, int32_t max_depth, double now_ms) {
    if (!current.choosing) {
        close_round(now_ms);
        current          = round();
        current.begin_ms = now_ms;
        current.choosing = true;
        current.disturbed = !prompts.empty();
    }
    auto & s = sequences[seq];
    const int32_t share = max_batch/(int32_t) sequences.size() - 1;
    const int32_t cap   = std::max(0, std::min({ limit, max_depth, share, DRAFT_DEPTH_MAX }));
    const int32_t depth = std::min(decide(seq, s, cap, limit >= max_depth), cap);

    current.tokens[seq] = 1;
    current.depths[seq] = depth;
    if (counters.rounds.size() <= (size_t) depth) {
        counters.rounds.resize(depth + 1);
    }
    counters.rounds[depth]++;
    return depth;
}

void draft_depth::drafted(double now_ms) {
    if (current.choosing) {
        current.draft_ms = now_ms - current.begin_ms;
        current.choosing = false;
    }
}

void draft_depth::verified(int32_t seq, int32_t n_drafted, int32_t n_accepted) {
    current.tokens[seq] = 1 + n_drafted;
    counters.n_drafted  += n_drafted;
    counters.n_accepted += n_accepted;
    acceptance.add(n_drafted, n_accepted);
    sequences[seq].acceptance.add(n_drafted, n_accepted);
}

void draft_depth::close_round(double now_ms) {
    bool    settled = !current.disturbed && prompts.empty() && !current.tokens.empty();
    int32_t size    = 0;
    int32_t longest = 0; // draft that came out, which may be shorter than asked for
    int32_t deepest = 0;
    for (const auto & [seq, tokens] : current.tokens) {
        size   += tokens;
        longest = std::max(longest, tokens - 1);
    }
    for (const auto & [seq, depth] : current.depths) {
        const auto it = sequences.find(seq);
        settled = settled && it != sequences.end() && it->second.n_since_change >= SETTLE_ROUNDS;
        deepest = std::max(deepest, depth);
    }
    if (!settled) {
        return;
    }
    n_rounds++;
    if (deepest > 0) {
        draft.add(longest > 0 ? longest : deepest, current.draft_ms, n_rounds);
    }
    verify.add(size, now_ms - current.begin_ms - (deepest > 0 ? current.draft_ms : 0.0), n_rounds);
}

//
// decisions
//

double draft_depth::score(int32_t seq, const sequence & s, int32_t depth, bool hopeful) const {
    double  tokens  = s.acceptance.expected(depth, &acceptance);
    int32_t size    = depth + 1;
    int32_t deepest = depth;
    for (const auto & [other, o] : sequences) {
        if (other != seq && o.depth >= 0) {
            tokens += o.acceptance.expected(o.depth, &acceptance);
            size   += o.depth + 1;
            deepest = std::max(deepest, o.depth);
        }
    }
    const double ms = verify.at(size) + (deepest > 0 ? draft.at(deepest) : 0.0);
    return tokens/std::max(hopeful ? ms*(1.0 - verify.doubt(size)) : ms, 1e-6);
}

int32_t draft_depth::best(int32_t seq, const sequence & s, int32_t cap) const {
    int32_t found = std::min(std::max(s.home, 0), cap);
    double  most  = (s.home < 0 ? 1.0 : GAIN)*score(seq, s, found);
    for (int32_t depth = 0; depth <= cap; ++depth) {
        const double one = (depth == 0 ? GAIN : 1.0)*score(seq, s, depth); // drafts have to win something, too
        if (one > most) {
            most  = one;
            found = depth;
        }
    }
    return found;
}

// The best of the others, if each took as little as may be.
int32_t draft_depth::promising(int32_t seq, const sequence & s, int32_t cap) const {
    int32_t found = -1;
    double  most  = 0.0;
    for (int32_t depth = 0; depth <= cap; ++depth) {
        const double one = depth == s.home ? 0.0 : score(seq, s, depth, true);
        if (one > most) {
            most  = one;
            found = depth;
        }
    }
    return found;
}

// The times of a few depths come first, the least tried one next; -1 when they are known. With several sequences sizes differ from
// round to round, and lines through what is known have to do.
int32_t draft_depth::unexplored(int32_t cap) const {
    if (sequences.size() > 1) {
        return -1;
    }
    int32_t  next  = -1;
    uint32_t least = EXPLORE_ROUNDS; // visits, measured or not: drafts may end early, so a size may never come up
    for (const int32_t wanted : EXPLORED) {
        const int32_t depth = std::min(wanted, cap);
        const auto    it    = visits.find(depth);
        const auto    n     = it == visits.end() ? 0 : it->second;
        if (n % EXPLORE_RUN != 0) {
            return depth;
        }
        if (n < least && (depth == 0 || acceptance.expected(depth) >= EXPLORE_TOKENS)) {
            least = n;
            next  = depth;
        }
    }
    return next;
}

void draft_depth::set_depth(sequence & s, int32_t depth) {
    if (s.depth != depth) {
        if (s.depth == 0) { // what was seen before is old
            s.acceptance.fade();
            acceptance.fade();
        }
        s.depth          = depth;
        s.n_since_change = 0;
    }
}

int32_t draft_depth::decide(int32_t seq, sequence & s, int32_t cap, bool may_explore) {
    s.n_since_change++;
    s.n_since_probe++;

    if (const int32_t depth = may_explore ? unexplored(cap) : -1; depth >= 0) {
        visits[depth]++;
        set_depth(s, depth);
        s.probe_left = 1; // ends with the next round
        return depth;
    }
    const bool first  = s.depth < 0;
    const bool probed = s.probe_left > 0 && --s.probe_left == 0;

    if (s.probe_left > 0) {
        return s.depth;
    }
    if (first || probed || s.depth > cap || s.n_since_change % DECIDE_EVERY == 0) {
        const int32_t depth = best(seq, s, cap);
        const bool    moved = depth != s.home;
        if (s.probe_every == 0 || (moved && !first)) {
            s.probe_every   = PROBE_FIRST;
            s.n_since_probe = 0;
        } else if (probed) {
            s.probe_every = std::min(2*s.probe_every, PROBE_SELDOM);
        }
        counters.n_changes += moved && s.home >= 0;
        s.home = depth;
        set_depth(s, depth);
    } else if (s.n_since_probe >= s.probe_every && cap > 0) {
        s.probe_left    = PROBE_ROUNDS;
        s.n_since_probe = 0;
        counters.n_probes++;
        set_depth(s, s.home > 0 && counters.n_probes % PROBES_OF_NONE == 1 ? 0 : promising(seq, s, cap));
    }
    return s.depth;
}

draft_stats draft_depth::stats() const {
    draft_stats copy = counters;
    for (size_t i = 0; i < acceptance.size(); ++i) {
        copy.acceptance.push_back(acceptance.rate(i));
    }
    for (const auto & [seq, s] : sequences) {
        copy.depths[seq] = s.depth;
    }
    copy.verify_ms = verify.entries();
    copy.draft_ms  = draft.entries();
    return copy;
}
