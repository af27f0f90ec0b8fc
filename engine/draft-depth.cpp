#include "draft-depth.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace {

// Logarithms of times
constexpr double   VERIFY_POWER  = 0.5;
constexpr double   VERIFY_STRAY  = 0.2;
constexpr double   DRAFT_POWER   = 1.0;
constexpr double   DRAFT_STRAY   = 0.05;  // tokens are drafted one by one
constexpr double   FIRST_LEVEL   = 1.0;   // deviation of all together before anything is measured: any time
constexpr double   DRIFT         = 0.001; // of those variances, with each round: 3 % for all sizes together
constexpr double   NOISE         = 0.3;   // deviation of one round
constexpr double   LONGEST       = 1.0;   // a round that takes more than twice what is expected counts as twice

constexpr double   RATE_HALF     = 256;   // rounds, after which a trial counts half
constexpr double   PRIOR_WEIGHT  = 16;    // trials that a prior is worth at most
constexpr double   FIRST_RATE    = 0.7;   // of the first position, before anything is known
constexpr double   FIRST_WEIGHT  = 2;

constexpr double   SPREAD        = 0.3;   // of the draws: at 1 more is tried than it wins within some answers
constexpr double   GAIN          = 1.02;  // what a change has to win
constexpr uint32_t PLAN_ROUNDS   = 8;
constexpr uint64_t AGAIN_FIRST   = 16;    // plan
constexpr uint64_t AGAIN_FACTOR  = 4;
constexpr uint32_t SETTLE_ROUNDS = 1;     // after a change: a graph is planned
constexpr int32_t  TRIED[]       = { 3, 0, 1 }; // depths of the first plans

// Of sizes i + 1 and j + 1, before anything is measured.
std::vector<std::vector<double>> first_covariance(size_t n, double stray) {
    std::vector<std::vector<double>> covariance(n, std::vector<double>(n));
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j) {
            covariance[i][j] = FIRST_LEVEL*FIRST_LEVEL + stray*stray*std::log(1.0 + std::min(i, j));
        }
    }
    return covariance;
}

// The same on every machine, which std::normal_distribution is not.
double normal(std::mt19937 & random) {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) {
        sum += random()/4294967296.0;
    }
    return sum;
}

} // namespace

//
// cost
//

draft_cost::draft_cost(int32_t n_sizes, double power, double stray) :
        power(power), first(first_covariance(n_sizes, stray)), mean(n_sizes), covariance(first), n(n_sizes) {
}

void draft_cost::pass() {
    for (size_t i = 0; i < mean.size() && measured; ++i) {
        for (size_t j = 0; j < mean.size(); ++j) {
            covariance[i][j] += DRIFT*first[i][j];
        }
    }
}

void draft_cost::add(int32_t size, double ms) {
    const size_t at = size - 1;
    if (size < 1 || at >= mean.size()) {
        return;
    }
    ms = std::max(ms, 1e-3);
    if (!measured) {
        for (size_t i = 0; i < mean.size(); ++i) {
            mean[i] = std::log(ms) + power*std::log((i + 1.0)/size);
        }
        measured = true;
    }
    const std::vector<double> row = covariance[at];
    const double variance = row[at] + NOISE*NOISE;
    const double off      = std::min(ms/std::exp(mean[at]) - 1.0, LONGEST); // of the time: its mean is looked for, not that of logarithms
    for (size_t i = 0; i < mean.size(); ++i) {
        mean[i] += row[i]/variance*off;
        for (size_t j = 0; j < mean.size(); ++j) {
            covariance[i][j] -= row[i]*row[j]/variance;
        }
    }
    n[at]++;
}

double draft_cost::at(int32_t size) const {
    return measured && size >= 1 ? std::exp(mean[std::min((size_t) size, mean.size()) - 1]) : 0.0;
}

// By the Cholesky factor of the covariance.
std::vector<double> draft_cost::draw(double spread, std::mt19937 & random) const {
    std::vector<double> ms(mean.size() + 1), independent(mean.size());
    if (!measured || spread == 0.0) {
        for (size_t i = 0; i < ms.size(); ++i) {
            ms[i] = at((int32_t) i);
        }
        return ms;
    }
    std::vector<std::vector<double>> factor(mean.size(), std::vector<double>(mean.size()));
    for (size_t i = 0; i < mean.size(); ++i) {
        independent[i] = spread*normal(random);
        double drawn = mean[i];
        for (size_t j = 0; j <= i; ++j) {
            double left = covariance[i][j];
            for (size_t k = 0; k < j; ++k) {
                left -= factor[i][k]*factor[j][k];
            }
            factor[i][j] = i == j ? std::sqrt(std::max(left, 1e-12)) : left/factor[j][j];
            drawn += factor[i][j]*independent[j];
        }
        ms[i + 1] = std::exp(drawn);
    }
    return ms;
}

std::map<int32_t, draft_cost::entry> draft_cost::entries() const {
    std::map<int32_t, entry> known;
    for (size_t i = 0; i < n.size(); ++i) {
        if (n[i] > 0) {
            known[i + 1] = { std::exp(mean[i]), n[i] };
        }
    }
    return known;
}

//
// acceptance
//

void draft_acceptance::pass() {
    static const double kept = std::exp2(-1.0/RATE_HALF);
    for (auto & p : positions) {
        p.trials *= kept;
        p.hits   *= kept;
    }
}

void draft_acceptance::add(int32_t n_drafted, int32_t n_accepted) {
    const size_t n_tried = (size_t) std::min(n_drafted, n_accepted + 1);
    if (positions.size() < n_tried) {
        positions.resize(n_tried);
    }
    for (size_t i = 0; i < n_tried; ++i) {
        positions[i].trials += 1.0;
        positions[i].hits   += (int32_t) i < n_accepted ? 1.0 : 0.0;
    }
}

draft_acceptance::belief draft_acceptance::belief_of(size_t position, const draft_acceptance * prior) const {
    belief lean = { FIRST_RATE, FIRST_WEIGHT };
    if (prior || position > 0) {
        lean        = prior ? prior->belief_of(position, nullptr) : belief_of(position - 1, nullptr);
        lean.trials = std::min<double>(lean.trials, PRIOR_WEIGHT);
    }
    const counts p = position < positions.size() ? positions[position] : counts();
    const double n = p.trials + lean.trials;
    return { (p.hits + lean.trials*lean.rate)/n, n };
}

std::vector<double> draft_acceptance::draw(int32_t depth, const draft_acceptance & prior, double spread, std::mt19937 & random) const {
    std::vector<double> tokens;
    double reached = 1.0;
    for (int32_t i = 0; i < depth; ++i) {
        const belief b   = belief_of(i, &prior);
        const double off = spread > 0.0 ? spread*normal(random)*std::sqrt(b.rate*(1.0 - b.rate)/(b.trials + 1.0)) : 0.0;
        reached *= std::min(std::max(b.rate + off, 0.0), 1.0);
        tokens.push_back(reached);
    }
    return tokens;
}

//
// events
//

draft_depth::draft_depth(int32_t max_batch) : max_batch(max_batch),
        verify(std::max(max_batch, 1), VERIFY_POWER, VERIFY_STRAY),
        draft(std::min(std::max(max_batch - 1, 1), DRAFT_DEPTH_MAX), DRAFT_POWER, DRAFT_STRAY) {
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
    sequences[seq] = sequence();
    current.disturbed = true;
}

void draft_depth::end(int32_t seq) {
    prompts.erase(seq);
    sequences.erase(seq);
    current.disturbed = true;
}

int32_t draft_depth::choose(int32_t seq, int32_t limit, int32_t max_depth, double now_ms) {
    auto & s = sequences[seq];
    const int32_t share = max_batch/(int32_t) sequences.size() - 1;
    s.cap = std::max(0, std::min({ limit, max_depth, share, DRAFT_DEPTH_MAX }));

    if (!current.choosing) {
        close_round(now_ms);
        current          = round();
        current.begin_ms = now_ms;
        current.choosing = true;
        current.disturbed = !prompts.empty();
        if (n_left == 0) {
            ++n_plans;
            planned = plan();
            n_left  = PLAN_ROUNDS;
        }
        --n_left;
    }
    if (planned.count(seq) == 0) {
        planned = plan(); // with the new one
    }
    const int32_t depth = std::min(planned[seq], s.cap);
    s.n_since_change++;
    if (s.depth != depth) {
        counters.n_changes += s.depth >= 0;
        s.depth          = depth;
        s.n_since_change = 0;
    }
    current.tokens[seq] = 1;
    current.chosen[seq] = depth;
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
    verify.pass();
    draft.pass();
    acceptance.pass();
    for (auto & [seq, s] : sequences) {
        s.acceptance.pass();
    }
    bool    settled = !current.disturbed && prompts.empty() && !current.tokens.empty();
    int32_t size    = 0;
    int32_t longest = 0; // draft that came out, which may be shorter than asked for
    int32_t deepest = 0;
    for (const auto & [seq, tokens] : current.tokens) {
        size   += tokens;
        longest = std::max(longest, tokens - 1);
    }
    for (const auto & [seq, depth] : current.chosen) {
        const auto it = sequences.find(seq);
        settled = settled && it != sequences.end() && it->second.n_since_change >= SETTLE_ROUNDS;
        deepest = std::max(deepest, depth);
    }
    if (!settled) {
        return;
    }
    if (deepest > 0) {
        draft.add(longest > 0 ? longest : deepest, current.draft_ms);
    }
    verify.add(size, now_ms - current.begin_ms - (deepest > 0 ? current.draft_ms : 0.0));
}

//
// decisions
//

// The first plans try depths in turn, since how sizes differ cannot be known without. What a cold server measured may keep draws from
// either none or any drafts for ever, so the other of these is tried again, four times as late each time.
draft_depth::depths draft_depth::plan() {
    uint64_t again = AGAIN_FIRST;
    while (again < n_plans) {
        again *= AGAIN_FACTOR;
    }
    if (n_plans <= std::size(TRIED) || n_plans == again) {
        const bool drafts = std::any_of(sequences.begin(), sequences.end(), [](const auto & of) { return of.second.depth > 0; });
        depths tried;
        for (const auto & [seq, s] : sequences) {
            tried[seq] = n_plans == again ? !drafts : TRIED[n_plans - 1];
        }
        counters.n_probes += n_plans == again;
        return tried;
    }
    const depths drawn = best(SPREAD);
    counters.n_probes += drawn != best(0.0);
    return drawn;
}

// From none on, the draft token that is most likely kept comes next: the best batch of each size. A change has to win something.
draft_depth::depths draft_depth::best(double spread) {
    const auto verify_ms = verify.draw(spread, random);
    const auto draft_ms  = draft.draw(spread, random);
    std::map<int32_t, std::vector<double>> tokens;
    depths  plan;
    int32_t size   = (int32_t) sequences.size();
    int32_t now_size = size, deepest = 0, now_deepest = 0;
    double  n_tokens = size, now_tokens = size;
    bool    comparable = true;
    for (const auto & [seq, s] : sequences) {
        tokens[seq] = s.acceptance.draw(s.cap, acceptance, spread, random);
        plan[seq]   = 0;
        comparable  = comparable && s.depth >= 0 && s.depth <= s.cap;
        for (int32_t i = 0; i < s.depth && i < s.cap; ++i) {
            now_tokens += tokens[seq][i];
            now_size++;
        }
        now_deepest = std::max(now_deepest, s.depth);
    }
    const auto score = [&](double n, int32_t size, int32_t deepest) {
        return n/std::max(verify_ms[std::min<size_t>(size, verify_ms.size() - 1)] + draft_ms[std::min<size_t>(deepest, draft_ms.size() - 1)], 1e-6);
    };
    depths found = plan;
    double most  = score(n_tokens, size, 0);
    while (true) {
        int32_t next = -1;
        for (const auto & [seq, s] : sequences) {
            if (plan[seq] < s.cap && (next < 0 || tokens[seq][plan[seq]] > tokens[next][plan[next]])) {
                next = seq;
            }
        }
        if (next < 0) {
            break;
        }
        n_tokens += tokens[next][plan[next]++];
        deepest   = std::max(deepest, plan[next]);
        if (const double one = score(n_tokens, ++size, deepest); one > most) {
            most  = one;
            found = plan;
        }
    }
    if (comparable && GAIN*score(now_tokens, now_size, now_deepest) >= most) {
        for (auto & [seq, depth] : found) {
            depth = sequences[seq].depth;
        }
    }
    return found;
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
