// draft-depth: simulated engines whose times and acceptances are known, so that the best depth is, too.

#include "check.h"

#include "draft-depth.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace {

// An engine on a simulated clock. A change of depth costs, as planning and capturing graphs does.
struct engine {
    std::function<double(int)> verify_ms = [](int n) { return 6.0 + 1.0*n; };
    std::function<double(int)> draft_ms  = [](int k) { return 0.5*k; };
    std::function<double(int)> accept    = [](int) { return 0.7; }; // by position, given those before
    double change_ms = 3.0;
    double noise     = 0.05;

    std::mt19937 random { 1 };
    double       clock_ms = 0.0;

    double uniform() { return std::uniform_real_distribution<double>(0.0, 1.0)(random); }

    int accepted(int depth) {
        int n = 0;
        while (n < depth && uniform() < accept(n)) {
            ++n;
        }
        return n;
    }

    // tokens per millisecond of a fixed depth, without noise
    double rate(int depth) const {
        double tokens = 1.0, reached = 1.0;
        for (int i = 0; i < depth; ++i) {
            reached *= accept(i);
            tokens  += reached;
        }
        return tokens/(verify_ms(depth + 1) + draft_ms(depth));
    }

    double best_rate(int max_depth) const {
        double most = 0.0;
        for (int depth = 0; depth <= max_depth; ++depth) {
            most = std::max(most, rate(depth));
        }
        return most;
    }

    // `n_rounds` of all `seqs`; returns tokens per millisecond, and the depths chosen in `chosen`
    double run(draft_depth & policy, const std::vector<int> & seqs, int n_rounds, int max_depth, std::vector<int> * chosen = nullptr) {
        const double from_ms = clock_ms;
        double tokens = 0.0;
        std::map<int, int> before;
        for (int i = 0; i < n_rounds; ++i) {
            std::map<int, int> depths;
            int size = 0, deepest = 0;
            for (const int seq : seqs) {
                const int depth = policy.choose(seq, 1000, max_depth, clock_ms);
                CHECK(depth >= 0 && depth <= max_depth);
                depths[seq] = depth;
                size    += depth + 1;
                deepest  = std::max(deepest, depth);
            }
            clock_ms += draft_ms(deepest)*(1.0 + noise*(2*uniform() - 1));
            policy.drafted(clock_ms);
            clock_ms += verify_ms(size)*(1.0 + noise*(2*uniform() - 1)) + (depths != before ? change_ms : 0.0);
            before = depths;
            for (const auto & [seq, depth] : depths) {
                const int n = accepted(depth);
                tokens += 1 + n;
                if (depth > 0) {
                    policy.verified(seq, depth, n);
                }
                if (chosen) {
                    chosen->push_back(depth);
                }
            }
        }
        return tokens/(clock_ms - from_ms);
    }
};

// Times as measured on a GPU, disturbed as they are there: single rounds that take 5 to 25 ms more, two in a row for each size when it comes
// up first and after each 256 tokens of context (a graph is planned, then captured), and the first 30 rounds of a server.
struct disturbed_engine {
    static constexpr int MAX_DEPTH = 7;

    double       rate = 0.0; // acceptance
    double       miss_ms = 0.0; // per token behind the first, in two of five rounds: experts that neither slots nor prefetch have
    std::mt19937 random;
    double       clock_ms = 0.0;
    int          n_rounds = 0;
    int          filled   = 0; // steps of 256 tokens
    std::map<int, int> captured; // rounds by depth since the last one

    // what is compared: expected values of the depths that were chosen, so luck is not in it
    double tokens = 0.0;
    double ms     = 0.0;

    double uniform(double from, double to) { return std::uniform_real_distribution<double>(from, to)(random); }

    // the depths are the policy's, or `fixed` without one
    void answer(draft_depth * policy, int fixed, int n_tokens) {
        static const double verify_ms[] = { 5.8, 6.8, 8.6, 9.7, 11.0, 12.4, 13.9, 15.3 };
        if (policy) {
            policy->prompt(0);
            policy->begin(0);
        }
        for (int n = 0; n < n_tokens; ++n_rounds) {
            if (n/256 != filled) {
                filled = n/256;
                captured.clear();
            }
            const int    depth    = policy ? policy->choose(0, 1000, MAX_DEPTH, clock_ms) : fixed;
            const double slow     = n_rounds < 30 ? 1.5 : 1.0;
            const double late_ms  = uniform(0.0, 1.0) < 1.0/15 ? uniform(5.0, 25.0) : 0.0;
            const bool   in_draft = depth > 0 && uniform(0.0, 1.0) < 0.25;
            const bool   capture  = captured[depth]++ < 2;
            clock_ms += 0.95*depth*slow*uniform(0.97, 1.03) + (in_draft ? late_ms : 0.0);
            if (policy) {
                policy->drafted(clock_ms);
            }
            const double missed_ms = miss_ms > 0.0 && uniform(0.0, 1.0) < 0.4 ? miss_ms*depth : 0.0;
            clock_ms += verify_ms[depth]*slow*uniform(0.97, 1.03) + missed_ms + (in_draft ? 0.0 : late_ms) + (capture ? uniform(5.0, 25.0) : 0.0);
            ms += (0.95*depth + verify_ms[depth])*slow + 0.4*miss_ms*depth + 1.0 + (capture ? 15.0 : 0.0);

            int hits = 0;
            while (hits < depth && uniform(0.0, 1.0) < rate) {
                ++hits;
            }
            if (policy && depth > 0) {
                policy->verified(0, depth, hits);
            }
            n += 1 + hits;
            for (int i = 0; i <= depth; ++i) {
                tokens += std::pow(rate, i);
            }
        }
        if (policy) {
            policy->end(0);
        }
    }

    // tokens per millisecond of five answers, and of those after the first
    std::pair<double, double> answers(draft_depth * policy, int fixed, int n_tokens) {
        answer(policy, fixed, n_tokens);
        const double first_tokens = tokens, first_ms = ms;
        for (int i = 1; i < 5; ++i) {
            answer(policy, fixed, n_tokens);
        }
        return { tokens/ms, (tokens - first_tokens)/(ms - first_ms) };
    }
};

// A server's first answers, short ones: a batch's shape costs more in its first three uses (its graph is built, then captured) and twice after
// each 256 tokens, a draft's first step has a shape for each count of tokens that were accepted, slots are cold, experts are missed.
struct fresh_engine {
    static constexpr int MAX_DEPTH = 7;

    double       rate = 0.0; // acceptance
    std::mt19937 random;
    double       clock_ms = 0.0;
    int          n_rounds = 0;
    int          verify_uses[MAX_DEPTH + 1] = {};
    int          draft_uses[MAX_DEPTH + 2]  = {}; // 0: the steps after the first

    double uniform(double from, double to) { return std::uniform_real_distribution<double>(from, to)(random); }

    double new_ms(int & uses, double from, double to) { return uses++ < 3 ? uniform(from, to) : 0.0; }

    void answer(draft_depth * policy, int fixed, bool first, int n_tokens) {
        static const double verify_ms[] = { 4.6, 5.8, 6.7, 8.1, 9.4, 9.9, 11.2, 12.4 };
        static const double draft_ms[]  = { 0.0, 0.8, 1.5, 2.3, 2.9, 3.3, 3.9, 4.5 };
        static const double miss_ms     = 0.6; // a token
        if (policy) {
            policy->prompt(0);
            policy->begin(0);
        }
        int filled = -1, kept = 0;
        for (int n = 0; n < n_tokens; ++n_rounds) {
            if ((n + 200)/256 != filled) {
                filled = (n + 200)/256;
                for (int & uses : verify_uses) { uses = std::min(uses, 1); }
                for (int & uses : draft_uses)  { uses = std::min(uses, 1); }
            }
            const int    depth    = policy ? policy->choose(0, n_tokens - n, MAX_DEPTH, clock_ms) : fixed;
            const double slow     = 1.0 + (first ? 0.5 : 0.15)*std::exp(-n/60.0) + (n_rounds < 20 ? 0.3 : 0.0);
            const double late_ms  = uniform(0.0, 1.0) < 1.0/30 ? uniform(3.0, 15.0) : 0.0;
            const bool   in_draft = depth > 0 && uniform(0.0, 1.0) < 0.25;
            clock_ms += draft_ms[depth]*slow*uniform(0.96, 1.04) + (in_draft ? late_ms : 0.0);
            clock_ms += depth > 0 ? new_ms(draft_uses[kept + 1], 1.0, 4.0) : 0.0;
            clock_ms += depth > 1 ? new_ms(draft_uses[0], 1.0, 4.0) : 0.0;
            if (policy) {
                policy->drafted(clock_ms);
            }
            clock_ms += (verify_ms[depth] - miss_ms*(depth + 1))*slow*uniform(0.96, 1.04) + (in_draft ? 0.0 : late_ms);
            clock_ms += new_ms(verify_uses[depth], 3.0, 9.0);
            for (int i = 0; i <= depth; ++i) {
                clock_ms += uniform(0.0, 1.0) < 0.3 ? miss_ms/0.3*uniform(0.0, 2.0) : 0.0;
            }
            int hits = 0;
            while (hits < depth && uniform(0.0, 1.0) < rate) {
                ++hits;
            }
            if (policy && depth > 0) {
                policy->verified(0, depth, hits);
            }
            kept = depth > 0 ? hits : std::min(MAX_DEPTH, kept + 1); // at depth 0 they wait
            n   += 1 + hits;
        }
        if (policy) {
            policy->end(0);
        }
    }

    // milliseconds of answers 2, 3, 5 and 6: two kinds of text, the first of each is not counted
    double answers(draft_depth * policy, int fixed, int n_tokens) {
        double ms = 0.0;
        for (int i = 0; i < 6; ++i) {
            const double from_ms = clock_ms;
            answer(policy, fixed, i == 0, n_tokens);
            ms += i % 3 ? clock_ms - from_ms : 0.0;
        }
        return ms;
    }
};

int most_frequent(const std::vector<int> & values, size_t from) {
    std::map<int, int> counts;
    for (size_t i = from; i < values.size(); ++i) {
        counts[values[i]]++;
    }
    return std::max_element(counts.begin(), counts.end(), [](const auto & a, const auto & b) { return a.second < b.second; })->first;
}

} // namespace

TEST(near_the_best_fixed_depth_whatever_the_engine) {
    struct kind { const char * name; double fixed, per_token, per_draft; };
    const kind kinds[] = {
        { "verify is nearly free", 8.0, 0.1, 0.3 }, { "misses grow", 4.0, 2.0, 0.3 }, { "verify is linear", 0.1, 5.0, 0.3 }, { "draft is dear", 6.0, 0.5, 3.0 },
    };
    for (const auto & kind : kinds) {
        for (const double rate : { 0.0, 0.3, 0.5, 0.7, 0.9, 1.0 }) {
            engine simulated;
            simulated.verify_ms = [&](int n) { return kind.fixed + kind.per_token*n; };
            simulated.draft_ms  = [&](int k) { return kind.per_draft*k; };
            simulated.accept    = [&](int)   { return rate; };
            draft_depth policy(8);
            policy.begin(0);
            const double first = simulated.run(policy, { 0 }, 300, 7);
            const double later = simulated.run(policy, { 0 }, 3000, 7);
            const double most  = simulated.best_rate(7);
            if (!CHECK(later >= 0.95*most) || !CHECK(later >= 0.96*simulated.rate(0)) || !CHECK(first >= 0.75*most)) {
                std::printf("  %s, acceptance %.1f: first %.4f, later %.4f, best %.4f, off %.4f\n", kind.name, rate, first, later, most, simulated.rate(0));
            }
        }
    }
}

// Answers of 200 tokens while expert slots fill, by times as measured on a GPU: what is tried early must not look dear for it.
TEST(slots_that_fill_do_not_decide) {
    for (const double rate : { 0.0, 0.3, 0.5, 0.7, 0.9 }) {
        double ratio_off = 0.0, ratio_best = 0.0;
        for (int run = 0; run < 5; ++run) {
            double cold = 1.0;
            engine simulated;
            simulated.random.seed(run);
            simulated.change_ms = 0.3;
            simulated.verify_ms = [&](int n) { return (6.5 + 1.7*(n - 1))*(1.0 + 0.7*cold); };
            simulated.draft_ms  = [](int k) { return 0.6*k; };
            simulated.accept    = [&](int)  { return rate; };
            draft_depth policy(8);
            double tokens = 0.0, ms = 0.0;
            for (int answer = 0; answer < 4; ++answer) {
                policy.prompt(0);
                policy.begin(0);
                for (double n = 0.0; n < 200.0;) {
                    const double from_ms = simulated.clock_ms;
                    const double of_round = simulated.run(policy, { 0 }, 1, 7)*(simulated.clock_ms - from_ms);
                    n    += of_round;
                    cold *= std::exp(-of_round/80.0);
                    if (answer > 0) {
                        tokens += of_round;
                        ms     += simulated.clock_ms - from_ms;
                    }
                }
                policy.end(0);
            }
            cold = 0.0;
            ratio_off  += tokens/ms/simulated.rate(0)/5;
            ratio_best += tokens/ms/simulated.best_rate(7)/5;
        }
        if (!CHECK(ratio_off >= 0.94) || !CHECK(ratio_best >= 0.90)) {
            std::printf("  acceptance %.1f: %.3f of off, %.3f of the best\n", rate, ratio_off, ratio_best);
        }
    }
}

TEST(disturbed_rounds_do_not_decide) {
    for (const double rate : { 0.0, 0.3, 0.5, 0.7, 0.9 }) {
        for (const int n_tokens : { 200, 2000 }) {
            const auto run = [&](draft_depth * policy, int fixed, int seed) {
                disturbed_engine simulated;
                simulated.rate = rate;
                simulated.random.seed(seed);
                return simulated.answers(policy, fixed, n_tokens);
            };
            const double off = run(nullptr, 0, 0).first;
            double best = 0.0;
            for (int fixed = 0; fixed <= disturbed_engine::MAX_DEPTH; ++fixed) {
                best = std::max(best, run(nullptr, fixed, 0).second);
            }
            for (int seed = 1; seed <= 20; ++seed) {
                draft_depth policy(8);
                const auto [all, later] = run(&policy, -1, seed);
                if (!CHECK(all >= 0.97*off) || !CHECK(n_tokens < 2000 || later >= 0.95*best)) {
                    std::printf("  acceptance %.1f, answers of %d, run %d: %.3f of off, %.3f of the best\n", rate, n_tokens, seed, all/off, later/best);
                }
            }
        }
    }
}

// Rounds take longer where more is missed. The time of most rounds is not what a depth costs then.
TEST(what_a_depth_costs_is_a_mean) {
    for (const double rate : { 0.3, 0.5, 0.7, 0.9 }) {
        const auto run = [&](draft_depth * policy, int fixed, int seed) {
            disturbed_engine simulated;
            simulated.rate    = rate;
            simulated.miss_ms = 6.0;
            simulated.random.seed(seed);
            return simulated.answers(policy, fixed, 2000);
        };
        double best = 0.0;
        for (int fixed = 0; fixed <= disturbed_engine::MAX_DEPTH; ++fixed) {
            best = std::max(best, run(nullptr, fixed, 0).second);
        }
        double mean = 0.0;
        for (int seed = 1; seed <= 20; ++seed) {
            draft_depth policy(8);
            const double later = run(&policy, -1, seed).second;
            mean += later/best/20;
            if (!CHECK(later >= 0.83*best)) {
                std::printf("  acceptance %.1f, run %d: %.3f of the best\n", rate, seed, later/best);
            }
        }
        if (!CHECK(mean >= 0.93)) {
            std::printf("  acceptance %.1f: %.3f of the best\n", rate, mean);
        }
    }
}

// Shares of the best fixed depth, means of the runs. What is measured in a server's first rounds must not decide for long.
TEST(fresh_servers_reach_the_best_depth) {
    const int n_runs = 40;
    const std::pair<double, double> least[] = { { 0.0, 0.965 }, { 0.3, 0.955 }, { 0.5, 0.935 }, { 0.7, 0.93 }, { 0.9, 0.92 } };
    for (const auto & [rate, wanted] : least) {
        const auto run = [&, rate = rate](bool chosen, int fixed, int seed) {
            fresh_engine simulated;
            simulated.rate = rate;
            simulated.random.seed(seed);
            draft_depth policy(8);
            return simulated.answers(chosen ? &policy : nullptr, fixed, 200);
        };
        double chosen_ms = 0.0, best_ms = INFINITY;
        for (int seed = 1; seed <= n_runs; ++seed) {
            chosen_ms += run(true, 0, seed);
        }
        for (int fixed = 0; fixed <= fresh_engine::MAX_DEPTH; ++fixed) {
            double ms = 0.0;
            for (int seed = 1; seed <= n_runs; ++seed) {
                ms += run(false, fixed, 1000 + seed);
            }
            best_ms = std::min(best_ms, ms);
        }
        if (!CHECK(best_ms/chosen_ms >= wanted)) {
            std::printf("  acceptance %.1f: %.3f of the best\n", rate, best_ms/chosen_ms);
        }
    }
}

// The depths of 600 rounds behind `n_cold` in which a batch of one token took `factor` times as long.
static std::vector<int> behind_a_cold_start(engine & simulated, double factor, int n_cold) {
    draft_depth policy(8);
    policy.begin(0);
    const auto normal = simulated.verify_ms;
    simulated.verify_ms = [&](int n) { return (n == 1 ? factor : 1.0)*normal(n); };
    simulated.run(policy, { 0 }, n_cold, 7);
    simulated.verify_ms = normal;
    std::vector<int> depths;
    simulated.run(policy, { 0 }, 600, 7, &depths);
    return depths;
}

// Other work on the machine while the first rounds are measured: 0 looked dear, and drafts that never hit must not stay for it.
TEST(a_disturbed_start_is_forgotten) {
    engine simulated;
    simulated.accept = [](int) { return 0.02; };
    CHECK_EQ(most_frequent(behind_a_cold_start(simulated, 2.0, 30), 200), 0);
}

// One token is cheaper than the line through larger batches says, and was dear while the server was cold: no drafts are best at any acceptance.
TEST(what_no_drafts_cost_is_measured_again) {
    for (int seed = 1; seed <= 20; ++seed) {
        engine simulated;
        simulated.random.seed(seed);
        simulated.accept    = [](int) { return 0.9; };
        simulated.draft_ms  = [](int k) { return 1.0*k; };
        simulated.verify_ms = [](int n) { return n == 1 ? 2.7 : 5.1 + 1.6*(n - 2); };
        CHECK_EQ(most_frequent(behind_a_cold_start(simulated, 1.5, 40), 400), 0);
    }
}

// Drafts of one token are 4.5 % faster than none, but the first ones were seldom accepted.
TEST(an_unlucky_start_near_break_even_is_overcome) {
    double share = 0.0;
    for (int seed = 1; seed <= 20; ++seed) {
        engine simulated;
        simulated.random.seed(seed);
        simulated.verify_ms = [](int n) { return 3.4 + 1.2*n; };
        simulated.draft_ms  = [](int k) { return 0.8*k; };
        draft_depth policy(8);
        policy.begin(0);
        simulated.accept = [](int) { return 0.25; };
        simulated.run(policy, { 0 }, 40, 7);
        simulated.accept = [](int) { return 0.5; };
        simulated.run(policy, { 0 }, 360, 7);
        std::vector<int> depths;
        simulated.run(policy, { 0 }, 400, 7, &depths);
        share += std::count_if(depths.begin(), depths.end(), [](int depth) { return depth > 0; })/400.0/20;
    }
    if (!CHECK(share >= 0.5)) {
        std::printf("  drafts in %.2f of the rounds\n", share);
    }
}

TEST(gives_up_and_comes_back) {
    engine simulated;
    simulated.verify_ms = [](int n) { return 1.0 + 4.0*n; };
    draft_depth policy(8);
    policy.begin(0);
    std::vector<int> depths;
    simulated.accept = [](int) { return 0.05; };
    simulated.run(policy, { 0 }, 1000, 7, &depths);
    CHECK_EQ(most_frequent(depths, 500), 0);
    const auto probes = policy.stats().n_probes;
    CHECK(probes > 0);

    depths.clear();
    simulated.accept    = [](int) { return 0.95; };
    simulated.verify_ms = [](int n) { return 5.0 + 0.5*n; };
    simulated.run(policy, { 0 }, 6000, 7, &depths);
    CHECK(most_frequent(depths, 5000) >= 5);

    depths.clear();
    simulated.verify_ms = [](int n) { return 1.0 + 8.0*n; }; // a cache that no longer holds the experts, say
    simulated.accept    = [](int) { return 0.3; };
    simulated.run(policy, { 0 }, 2000, 7, &depths);
    CHECK_EQ(most_frequent(depths, 1000), 0);
}

TEST(small_gains_change_nothing) {
    engine simulated;
    simulated.verify_ms = [](int) { return 5.0; };
    simulated.draft_ms  = [](int k) { return 2.0*k; }; // depth 1 and 2 are nearly the same
    simulated.accept    = [](int i) { return i == 0 ? 0.6 : 0.6; };
    draft_depth policy(8);
    policy.begin(0);
    simulated.run(policy, { 0 }, 300, 7);
    const auto before = policy.stats().n_changes;
    simulated.run(policy, { 0 }, 4000, 7);
    CHECK(policy.stats().n_changes - before < 25);
}

TEST(sequences_share_the_batch) {
    for (int n_seq = 1; n_seq <= 12; ++n_seq) {
        engine simulated;
        simulated.verify_ms = [](int) { return 5.0; };
        simulated.accept    = [](int) { return 0.95; };
        draft_depth policy(8);
        std::vector<int> seqs;
        for (int seq = 0; seq < n_seq; ++seq) {
            policy.begin(seq);
            seqs.push_back(seq);
        }
        std::vector<int> depths;
        simulated.run(policy, seqs, 400, 7, &depths);
        CHECK_EQ(*std::max_element(depths.begin() + 200, depths.end()), std::max(0, 8/n_seq - 1));
        policy.end(1);
        CHECK_EQ(policy.stats().depths.size(), (size_t) n_seq - (n_seq > 1));
    }
}

TEST(limits_hold) {
    draft_depth policy(8);
    policy.begin(0);
    std::mt19937 random(3);
    double clock_ms = 0.0;
    for (int i = 0; i < 5000; ++i) {
        const int limit     = (int) (random() % 12) - 2;
        const int max_depth = (int) (random() % 9);
        const int depth = policy.choose(0, limit, max_depth, clock_ms += 1.0);
        CHECK(depth >= 0 && depth <= std::max(0, std::min({ limit, max_depth, 7 })));
        policy.drafted(clock_ms += 1.0);
        if (depth > 0 && random() % 3) { // a draft may come out shorter, or not at all
            const int n_drafted = 1 + (int) (random() % depth);
            policy.verified(0, n_drafted, (int) (random() % (n_drafted + 1)));
        }
    }
}

TEST(the_same_events_give_the_same_depths) {
    std::vector<int> runs[2];
    for (auto & depths : runs) {
        engine simulated;
        draft_depth policy(8);
        policy.begin(4);
        simulated.run(policy, { 4 }, 1500, 7, &depths);
    }
    CHECK(runs[0] == runs[1]);
}

TEST(rounds_with_a_prompt_or_a_pause_are_not_measured) {
    engine simulated;
    simulated.noise = 0.0;
    draft_depth policy(8);
    policy.begin(0);
    simulated.run(policy, { 0 }, 500, 7);
    const auto check_times = [&] {
        for (const auto & [size, entry] : policy.stats().verify_ms) {
            CHECK(entry.ms <= simulated.verify_ms(size) + simulated.change_ms);
        }
    };
    check_times();

    policy.prompt(1);
    const auto normal = simulated.verify_ms;
    simulated.verify_ms = [](int) { return 900.0; };
    simulated.run(policy, { 0 }, 20, 7);
    policy.end(1);
    simulated.verify_ms = normal;
    simulated.run(policy, { 0 }, 20, 7);
    check_times();

    policy.end(0);
    simulated.clock_ms += 1e6;
    policy.begin(0);
    simulated.run(policy, { 0 }, 20, 7);
    check_times();
}

// A draft may end early; its time says nothing about one of full length.
TEST(short_drafts_are_times_of_short_drafts) {
    draft_depth policy(8);
    policy.begin(0);
    std::mt19937 random(5);
    double clock_ms = 0.0;
    for (int i = 0; i < 1000; ++i) {
        const int depth     = policy.choose(0, 1000, 7, clock_ms);
        const int n_drafted = std::min(depth, 1 + (int) (random() % 8));
        policy.drafted(clock_ms += 0.5*n_drafted);
        clock_ms += 5.0 + 0.2*n_drafted;
        if (n_drafted > 0) {
            policy.verified(0, n_drafted, n_drafted);
        }
    }
    for (const auto & [length, time] : policy.stats().draft_ms) {
        CHECK(std::fabs(time.ms - 0.5*length) < 0.05);
    }
    CHECK(policy.stats().draft_ms.size() >= 5);
}

TEST(acceptance_is_conditional) {
    draft_acceptance rates;
    for (int i = 0; i < 2000; ++i) {
        rates.add(3, i % 2 ? 0 : i % 4 ? 1 : 3); // half the first, of those half the second, of those all
    }
    CHECK(std::fabs(rates.rate(0) - 0.5) < 0.05);
    CHECK(std::fabs(rates.rate(1) - 0.5) < 0.05);
    CHECK(rates.rate(2) > 0.9);
    std::mt19937 random(1);
    const auto tokens = rates.draw(3, rates, 0.0, random);
    CHECK_EQ(tokens.size(), (size_t) 3);
    CHECK(std::fabs(tokens[0] + tokens[1] + tokens[2] - 1.0) < 0.1);
}

TEST(costs_between_and_beyond) {
    draft_cost cost(8, 0.5, 0.2);
    CHECK_EQ(cost.at(3), 0.0);
    cost.add(2, 10.0);
    CHECK(std::fabs(cost.at(2) - 10.0) < 1e-9);
    CHECK(std::fabs(cost.at(8) - 20.0) < 1e-9);
    for (int i = 0; i < 30; ++i) {
        cost.add(2, 10.0);
        cost.add(4, 14.0);
    }
    CHECK(std::fabs(cost.at(2) - 10.0) < 0.1);
    CHECK(std::fabs(cost.at(4) - 14.0) < 0.1);
    CHECK(cost.at(3) > 11.0 && cost.at(3) < 13.0);
    CHECK(cost.at(1) > 6.0 && cost.at(1) < 8.0);
    CHECK(cost.at(8) > 18.0 && cost.at(8) < 22.0);
    CHECK_EQ(cost.entries().size(), (size_t) 2);

    draft_cost proportional(7, 1.0, 0.05);
    proportional.add(3, 6.0);
    CHECK(std::fabs(proportional.at(1) - 2.0) < 1e-9);
    proportional.add(8, 6.0); // there is no such size
    CHECK_EQ(proportional.entries().size(), (size_t) 1);
    for (int i = 0; i < 8; ++i) {
        proportional.add(3, 6.0);
    }
    for (int i = 0; i < 20; ++i) {
        proportional.add(1, 1.0); // three tokens were drafted by a cold server
    }
    CHECK(proportional.at(2)/proportional.at(1) < 2.3);
}

// A round in eight takes three times as long, whatever the size: sizes keep their order, and what they gain on each other.
TEST(disturbed_rounds_move_all_sizes) {
    draft_cost cost(8, 0.5, 0.2);
    for (int i = 0; i < 160; ++i) {
        cost.pass();
        const int size = i / 8 % 2 ? 2 : 4;
        cost.add(size, (size == 2 ? 10.0 : 13.0)*(i % 8 == 3 ? 3.0 : 1.0));
    }
    CHECK(cost.at(2) < 12.0);
    CHECK(std::fabs(cost.at(4)/cost.at(2) - 1.3) < 0.1);
    CHECK(cost.at(1) < cost.at(2));
}

// Rounds in which the slots are filled take longer: their times are left out, and the next one's is not.
TEST(rounds_that_do_something_else_are_not_measured) {
    draft_depth policy(8);
    policy.begin(0);
    double now = 0;
    for (int i = 0; i < 80; ++i) {
        const bool slow = i % 8 != 0;
        const int32_t n = policy.choose(0, 3, 3, now);
        if (slow) {
            policy.disturbed();
        }
        policy.drafted(now);
        policy.verified(0, n, n);
        now += slow ? 100.0 : 10.0;
    }
    for (const auto & [size, entry] : policy.stats().verify_ms) {
        CHECK(entry.ms < 11.0);
    }
    CHECK(!policy.stats().verify_ms.empty());
}

// What is seen again and again moves what was measured long ago by the same factor; how far that may be off grows with age.
TEST(old_times_move_with_new_ones) {
    const auto off = [](const draft_cost & cost, int size, int of) { // deviation of drawn ratios
        std::mt19937 random(1);
        double sum = 0.0;
        for (int i = 0; i < 200; ++i) {
            const auto   ms    = cost.draw(1.0, random);
            const double ratio = std::log(ms[size]/ms[of]) - std::log(cost.at(size)/cost.at(of));
            sum += ratio*ratio/200;
        }
        return std::sqrt(sum);
    };
    draft_cost cost(8, 0.5, 0.2);
    for (int i = 0; i < 12; ++i) {
        cost.pass();
        cost.add(1, 10.0);
        cost.add(4, 16.0);
    }
    CHECK(std::fabs(cost.at(4) - 16.0) < 0.5);
    const double before = off(cost, 4, 1);
    CHECK(off(cost, 6, 1) > before);
    for (int i = 0; i < 500; ++i) {
        cost.pass();
        cost.add(1, 5.0);
    }
    CHECK(std::fabs(cost.at(1) - 5.0) < 0.1);
    CHECK(cost.at(4) < 11.0);
    CHECK(off(cost, 4, 1) > 1.3*before);
    std::mt19937 random(1);
    CHECK(std::fabs(cost.draw(0.0, random)[4] - cost.at(4)) < 1e-9);
}

TEST_MAIN("test-draft-depth")
