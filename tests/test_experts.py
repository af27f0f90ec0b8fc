"""Experts in host memory give stock's answers, whatever the cache holds.

Plain "==" of answers: as stock at the same split, bit for bit, logprobs too. "Any split": see test_tokens.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from engine_server import (
    DECODE_UBATCH,
    MIN_TOKENS,
    NO_CUTS,
    PREFILL_UBATCH,
    SOME_OF_FOUR,
    assert_same_but_for_ties,
    drafts_of,
    mtp,
    wait_until,
)
from expert_servers import (
    N_EXPERT,
    N_LAYER,
    N_USED,
    RAW,
    TRANSACTION,
    VARIANTS,
    ExpertFleet,
    experts,
    missed,
    stopped_at_the_end,
)

pytestmark = pytest.mark.engine

ARCHITECTURES = ["qwen4exp", "qwen3moe", "qwen35moe"]
EXACT = ["qwen4exp-exact", "qwen3moe-exact", "qwen35moe-exact"]
NO_FLASH = ("-fa", "off")  # then F32 models are exact for any split of one prompt
NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "6")
ONE_TO_FOUR_PASSES = [300, PREFILL_UBATCH + 1, 1100, 2000]


@pytest.mark.parametrize("n_slots", [N_USED, N_USED + 1, 13, N_EXPERT - 1, N_EXPERT])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_any_number_of_slots(servers: ExpertFleet, prompt, model: str, n_slots: int) -> None:
    """Cold and warm, after short prompts and after those that take the stock path."""
    server = servers.slots(model, n_slots)
    assert experts(server)["slots_per_layer"] == n_slots
    for n in (1, 1, 20, DECODE_UBATCH + 9, 1, 20):
        tokens = prompt(model, n)
        assert server.complete(tokens, n=40) == servers.stock_answer(model, tokens, 40)
    counters = experts(server)["slots"]
    assert counters["missed"] > counters["evicted"] > 0 or n_slots == N_EXPERT
    if n_slots == N_EXPERT:
        assert counters["evicted"] == 0 and counters["missed"] <= N_EXPERT * N_LAYER


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_prefetch_changes_nothing_but_the_misses(servers: ExpertFleet, prompt, model: str) -> None:
    """Experts predicted and copied ahead, rightly or not: the same answers, fewer lookups that have to copy."""
    missed_with = {}
    for predicted in ("0", "1", "auto", "64"):
        server = servers.slots(model, 8, EXPERT_BATCH=2, PREFETCH=predicted)
        for n in (1, 2, 20):
            tokens = prompt(model, n)
            assert server.complete(tokens, n=60) == servers.stock_answer(model, tokens, 60)
        counters = experts(server)
        missed_with[predicted] = counters["slots"]["missed"]
        assert (counters["prefetch"]["copied"] > 0) == (predicted != "0")
        assert counters["layers"][0]["prefetched"] == 0, "nothing comes before the first layer"
    assert missed_with["0"] > missed_with["1"] > missed_with["auto"]


@pytest.mark.parametrize(
    ("model", "batch"), [*(("qwen3moe", n) for n in range(1, 9)), *product(["many", "many-35"], [1, 5, 8])]
)
def test_any_batch(servers: ExpertFleet, prompt, model: str, batch: int) -> None:
    """With the fewest slots that are safe. A prompt up to EXPERT_BATCH is served from slots, a longer one is not."""
    server = servers.slots(model, batch * N_USED, *NO_CUTS, EXPERT_BATCH=batch)
    for n in range(1, 10):
        before = experts(server)["layers"][0]
        tokens = prompt(model, n, seed=n)
        assert server.complete(tokens, n=5) == servers.stock_answer(model, tokens, 5, *NO_CUTS)
        after = experts(server)["layers"][0]
        n_looked_up = 4 + (n if n <= batch else 0)
        assert after["looked_up"] - before["looked_up"] == n_looked_up * N_USED
        assert after["runs"] - before["runs"] == 4 + int(n <= batch)


@pytest.mark.parametrize("n_draft", [1, 3, 7])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe", "mixed-mtp"])
def test_mtp_verify_batches(servers: ExpertFleet, prompt, model: str, n_draft: int) -> None:
    """Batches of 2, 4 and 8 tokens, with the fewest slots; the draft's experts have slots of their own."""
    batch = n_draft + 1
    args = mtp(n_draft)
    slots = {"EXPERT_BATCH": batch, "DRAFT_SLOTS": batch * N_USED}
    server = servers.switching(model, batch * N_USED, *args, **slots)
    for n in (5, 1100):
        tokens = prompt(model, n)
        of_stock = servers.stock_answer(model, tokens, 64, *args, ubatch=DECODE_UBATCH if n == 5 else PREFILL_UBATCH)
        of_phase = server.complete(tokens, n=64)
        assert of_phase == of_stock
        assert of_phase.timings["draft_n"] == of_stock.timings["draft_n"] > 0
        assert of_phase.timings["draft_n_accepted"] == of_stock.timings["draft_n_accepted"]
    target, draft = experts(server, 0), experts(server, 1)
    assert [layer["layer"] for layer in target["layers"]] == list(range(N_LAYER))
    assert [layer["layer"] for layer in draft["layers"]] == [N_LAYER]
    assert target["slots_per_layer"] == draft["slots_per_layer"] == batch * N_USED
    assert target["slots"]["looked_up"] > target["slots"]["runs"] * N_USED, "batches of several tokens were served"


@pytest.mark.parametrize(("model", "unified"), [("qwen4exp", "-kvu"), ("qwen35moe", "-no-kvu"), ("mixed-mtp", "-kvu")])
def test_verify_batches_of_some_of_the_slots(servers: ExpertFleet, prompt, model: str, unified: str) -> None:
    """Two and three of four slots draft; their batches share expert slots, of which there are few."""
    flags, sizes = (*mtp(1), unified), {"parallel": 4}
    server = servers.slots(model, 8 * N_USED, *flags, sizes=sizes, EXPERT_BATCH=8, DRAFT_SLOTS=8 * N_USED)
    stock = servers.stock(model, *RAW, *flags, ubatch=DECODE_UBATCH, **sizes)
    prompts = [prompt(model, n, seed=n) for n in (20, 100, 60)]
    for n in SOME_OF_FOUR:
        of_phase, of_stock = (one.complete_together(prompts[:n], 30) for one in (server, stock))
        assert of_phase == of_stock and drafts_of(of_phase) == drafts_of(of_stock)
        assert all(accepted for _, accepted in drafts_of(of_phase))
    assert experts(server)["slots"]["looked_up"] > experts(server)["slots"]["missed"] > 0


def test_ngram_verify_batches(servers: ExpertFleet, prompt) -> None:
    """Drafts that come from the prompt itself, which holds an answer to its own end."""
    model = "qwen3moe-exact"
    question = prompt(model, 20)
    tokens = [*question, *servers.stock_answer(model, question, 48).tokens] * 3 + question
    of_stock = servers.stock_answer(model, tokens, 48, *NGRAM)
    assert of_stock.timings["draft_n"] > 0
    server = servers.slots(model, 7 * N_USED, *NGRAM, EXPERT_BATCH=7)
    assert server.complete(tokens, n=48) == of_stock
    figures = experts(server)["slots"]
    assert figures["looked_up"] > figures["runs"] * N_USED, "batches of several tokens were served"


@pytest.mark.parametrize("model", EXACT)
@pytest.mark.parametrize(("parallel", "batch"), [(2, 2), (5, 5), (8, 8), (8, 3)])
def test_parallel_generation(servers: ExpertFleet, prompt, model: str, parallel: int, batch: int) -> None:
    """Any split but for ties: batches of one token of each request; those above EXPERT_BATCH take the stock path."""
    sizes = {"parallel": parallel, "ctx": 512 * parallel}
    server = servers.slots(model, min(batch * N_USED, N_EXPERT), *NO_FLASH, EXPERT_BATCH=batch, sizes=sizes)
    prompts = [prompt(model, 6 + i, seed=i) for i in range(parallel)]
    for tokens, answer in zip(prompts, server.complete_all(prompts, n=32), strict=True):
        assert_same_but_for_ties(answer.tokens, servers.stock_answer(model, tokens, 32, *NO_FLASH))


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_repeated_ids_in_a_batch(servers: ExpertFleet, model: str) -> None:
    """One token eight times: the first layer's experts are copied once each, not once per token."""
    server = servers.alone(model, N_EXPERT, EXPERT_BATCH=8)
    try:
        tokens = [777] * 8
        assert server.complete(tokens, n=1) == servers.stock_answer(model, tokens, 1)
        first = experts(server)["layers"][0]
        assert first["looked_up"] >= 4 * N_USED, "a checkpoint may cut the batch in two"
        assert first["missed"] <= first["looked_up"] // 2
    finally:
        server.stop()


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_a_thousand_steps(servers: ExpertFleet, prompt, model: str) -> None:
    tokens = prompt(model, 3)
    server = servers.slots(model, N_USED + 2)
    assert server.complete(tokens, n=1100) == servers.stock_answer(model, tokens, 1100)
    assert experts(server)["slots"]["evicted"] > 1000


@pytest.mark.parametrize("model", ["qwen3moe", "qwen4exp"])
def test_a_thousand_steps_behind_a_prompt(servers: ExpertFleet, prompt, model: str) -> None:
    """What the switch back has planned is enough for the rest of the answer: no buffer grows, no graph is kept anew."""
    with stopped_at_the_end(servers) as start:
        server = start(model, N_USED + 2, **TRANSACTION)

        def held() -> tuple:
            state = server.phase()
            return state["memory"]["decode"], [member["made"] for member in state["graphs"]], state["counters"]["left"]

        with server.stream(prompt(model, 1100), n=1000) as pieces:
            at_first = [held() for _, piece in zip(range(10), pieces, strict=False)][-1]
            n_last = sum(len(piece["tokens"]) for piece in pieces)
        assert n_last > 900 and held() == at_first and at_first[-1] == 1
        assert experts(server)["slots"]["runs"] >= 999 * N_LAYER
        server.stop()
        assert "does not match expectation" not in server.log_text()


@pytest.mark.parametrize("ring", [0, 2, 3, 64])
@pytest.mark.parametrize("restore", ["cold", "snapshot", "prompt"])
def test_transactions(servers: ExpertFleet, prompt, restore: str, ring: int) -> None:
    """Every policy and ring, prompts of one to four micro-batches with generation between them."""
    check_transactions(servers, prompt, "qwen3moe", restore, ring)


@pytest.mark.parametrize(("restore", "ring"), [("cold", 3), ("snapshot", 2), ("prompt", 0)])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe", "biased"])
def test_transactions_of_other_models(servers: ExpertFleet, prompt, model: str, restore: str, ring: int) -> None:
    """Hybrid ones, and gpt-oss, whose experts have biases."""
    check_transactions(servers, prompt, model, restore, ring)


def check_transactions(servers: ExpertFleet, prompt, model: str, restore: str, ring: int, n_slots: int = 14) -> None:
    server = servers.switching(model, n_slots, RESTORE=restore, RING=ring)
    before = server.counters()
    for n in ONE_TO_FOUR_PASSES:
        for length in (n, 7):
            tokens = prompt(model, length)
            ubatch = PREFILL_UBATCH if length >= MIN_TOKENS else DECODE_UBATCH
            assert server.complete(tokens, n=24) == servers.stock_answer(model, tokens, 24, ubatch=ubatch)
    after = server.counters()
    assert after["left"] - before["left"] == after["entered"] - before["entered"] == len(ONE_TO_FOUR_PASSES)
    figures = experts(server)
    assert figures["slots_per_layer"] == n_slots
    assert bool(figures["ring"]["layers_streamed"]) == bool(ring)
    assert "note" not in figures


@pytest.mark.parametrize("args", [(), NO_CUTS], ids=["cut", "whole"])
@pytest.mark.parametrize("batch", [PREFILL_UBATCH, 4 * PREFILL_UBATCH])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
def test_cuts_for_checkpoints_cost_no_pass(
    servers: ExpertFleet, prompt, model: str, batch: int, args: tuple[str, ...]
) -> None:
    """The server cuts a prompt a micro-batch and 4 tokens before its end, and 4 before it: layers are streamed once for
    each micro-batch that the prompt has without cuts, and the last 4 tokens are served from slots."""
    server = servers.switching(model, 4 * N_USED, *args, EXPERT_BATCH=4, sizes={"batch": batch})
    for n in (300, PREFILL_UBATCH, PREFILL_UBATCH + 5, 1100):
        before = experts(server)
        tokens = prompt(model, n)
        of_stock = servers.stock_answer(model, tokens, 4, *args, ubatch=PREFILL_UBATCH, batch=batch)
        assert server.complete(tokens, n=4) == of_stock
        after = experts(server)
        n_streamed = after["ring"]["layers_streamed"] - before["ring"]["layers_streamed"]
        # rounded up: in some models the last layer has nothing to do where no token is sampled from
        assert -(-n_streamed // N_LAYER) == -(-n // PREFILL_UBATCH)
        n_looked_up = after["layers"][0]["looked_up"] - before["layers"][0]["looked_up"]
        assert n_looked_up == (3 if args else 3 + 4) * N_USED


@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
def test_a_checkpoint_at_a_message_costs_a_pass_only_behind_enough_tokens(
    servers: ExpertFleet, prompt, model: str
) -> None:
    """The server ends a batch where a user's message begins. In the prefill phase that is another pass over all
    experts, which a system prompt of 30 tokens is not worth."""
    server = servers.switching(model, 4 * N_USED, EXPERT_BATCH=4, sizes={"batch": PREFILL_UBATCH})
    mark = "user mark"
    ids = server.http.post("/tokenize", json={"content": mark, "add_special": False}).json()["tokens"]
    for at, extra in ((30, 0), (MIN_TOKENS - 1, 0), (MIN_TOKENS + 8, 1)):
        tokens = [*prompt(model, at, seed=at), *ids, *prompt(model, 1020, seed=at + 1)][:1020]
        before = experts(server)
        answer = server.complete(tokens, n=4, message_delimiters=[{"role": "user", "delimiter": mark}])
        n_streamed = experts(server)["ring"]["layers_streamed"] - before["ring"]["layers_streamed"]
        assert -(-n_streamed // N_LAYER) == -(-len(tokens) // PREFILL_UBATCH) + extra, at
        if not extra:
            assert answer == servers.stock_answer(model, tokens, 4, ubatch=PREFILL_UBATCH, batch=PREFILL_UBATCH)


@pytest.mark.parametrize("model", VARIANTS)
def test_other_experts(servers: ExpertFleet, prompt, model: str) -> None:
    """Types that differ between layers, sizes that are no multiple of 16, fused gate and up, biases, scales, one expert
    or all: with few slots and a ring of exactly two regions, and with as many slots as experts, in both phases."""
    _, overrides = VARIANTS[model]
    n_expert, n_used = overrides.get("experts", N_EXPERT), overrides.get("experts_used", N_USED)
    for n_slots, ring in ((n_used, 2), (n_expert, "auto")):
        server = servers.switching(model, n_slots, RING=ring)
        for n in (1, 7, 700, 7):
            tokens = prompt(model, n)
            ubatch = PREFILL_UBATCH if n >= MIN_TOKENS else DECODE_UBATCH
            assert server.complete(tokens, n=16) == servers.stock_answer(model, tokens, 16, ubatch=ubatch), n
        figures = experts(server)
        assert figures["slots_per_layer"] == n_slots
        assert figures["slots"]["missed"] > 0 and figures["ring"]["layers_streamed"] > 0
        assert len(figures["layers"]) == N_LAYER and not figures["stock_layers"]


@pytest.mark.parametrize("model", EXACT)
@pytest.mark.parametrize("ring", [0, 2, 3])
def test_two_prompts_at_once(servers: ExpertFleet, prompt, model: str, ring: int) -> None:
    """Any split but for ties: two slots of the server in the prefill phase together."""
    server = servers.switching(model, 9, *NO_FLASH, RING=ring, EXPERT_BATCH=2, sizes={"parallel": 2, "ctx": 4096})
    prompts = [prompt(model, n, seed=n) for n in (900, 600)]
    for tokens, answer in zip(prompts, server.complete_all(prompts, n=32), strict=True):
        assert_same_but_for_ties(answer.tokens, servers.stock_answer(model, tokens, 32, *NO_FLASH))
    assert server.phase()["phase"] == "decode"


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_cancel(servers: ExpertFleet, prompt, model: str) -> None:
    """In the middle of a prompt and of an answer; the next answers are right, the slots as many as before."""
    server = servers.switching(model, 10, sizes={"ctx": 8192})
    aborted = server.counters()["aborted"]
    with server.stream(prompt(model, 7000, seed=9)):
        wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
    wait_until(lambda: server.counters()["aborted"] == aborted + 1, "cancelled")
    with server.stream(prompt(model, 400, seed=9), n=2000, n_probs=0) as pieces:
        next(pieces)
    for n in (5, 600):
        tokens = prompt(model, n)
        ubatch = PREFILL_UBATCH if n >= MIN_TOKENS else DECODE_UBATCH
        assert server.complete(tokens) == servers.stock_answer(model, tokens, 24, ubatch=ubatch, ctx=8192)
    assert (experts(server)["slots_per_layer"], experts(server)["ring_bytes"]) == (10, 0)


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("model", EXACT)
def test_cancel_one_of_two_prompts(servers: ExpertFleet, prompt, model: str, ring: int) -> None:
    """Any split but for ties: the ring goes on for the other slot, which leaves when it is done."""
    sizes = {"parallel": 2, "ctx": 16384}
    server = servers.switching(model, 9, *NO_FLASH, RING=ring, EXPERT_BATCH=2, sizes=sizes)
    before = server.counters()
    tokens = prompt(model, 1500, seed=3)
    with ThreadPoolExecutor(1) as pool:
        with server.stream(prompt(model, 7000, seed=9)):
            wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
            other = pool.submit(server.complete, tokens, n=32)
            wait_until(lambda: server.counters()["prompts"] == before["prompts"] + 2, "the second prompt began")
        answer = other.result()
    assert_same_but_for_ties(answer.tokens, servers.stock_answer(model, tokens, 32, *NO_FLASH))
    wait_until(lambda: server.phase()["phase"] == "decode", "left")
    assert server.counters()["aborted"] == before["aborted"] + 1
    assert (experts(server)["slots_per_layer"], experts(server)["ring_bytes"]) == (9, 0)


def test_a_reused_prefix(servers: ExpertFleet, prompt) -> None:
    """A second prompt that extends the first by few tokens (slots) and by many (ring)."""
    model = "qwen3moe"
    server, stock = servers.switching(model, 32, EXPERT_BATCH=8), servers.stock(model, *RAW)
    for n in (500, 505, 900):
        tokens = prompt(model, n)
        assert server.complete(tokens, n=8, cache=True) == stock.complete(tokens, n=8, cache=True)


@pytest.mark.parametrize(
    ("restore", "refill"), [("cold", 256), ("snapshot", 256), ("prompt", 256), ("snapshot", 0), ("prompt", 0)]
)
def test_a_prompt_and_the_working_set(servers: ExpertFleet, prompt, restore: str, refill: int) -> None:
    """After a long prompt the snapshot serves the same text without a miss, but for the first step when that does not
    wait for the refill; a cold start copies it all again."""
    model = "qwen3moe"
    phases = {"PREFILL_MODE": "transaction", "PREFILL_UBATCH": PREFILL_UBATCH, "RESTORE": restore}
    phases["REFILL_MIB"] = str(refill)
    server = servers.alone(model, N_EXPERT, PREFETCH="0", **phases)
    try:
        short = prompt(model, 1)
        server.complete(short, n=100)
        cold = missed(server)
        assert 0 < cold <= N_EXPERT * N_LAYER
        server.complete(prompt(model, 1500, seed=4), n=1)
        before = missed(server)
        server.complete(short, n=100)
        again = missed(server) - before
        assert server.counters()["left"] == 1
        assert again > cold / 2 if restore == "cold" else again == (N_USED * N_LAYER if refill else 0), (cold, again)
    finally:
        server.stop()


def test_slots_of_experts_that_the_prompt_used(servers: ExpertFleet, prompt) -> None:
    """With few slots, right behind a prompt: what its end chose is needed again."""
    model = "qwen3moe"
    tokens, other = prompt(model, 1000, seed=6), prompt(model, 1, seed=7)
    first_misses = {}
    for restore in ("cold", "prompt"):
        server = servers.switching(model, 8, RESTORE=restore, PREFETCH="0")
        server.complete(other, n=60)
        before = missed(server)
        server.complete(tokens, n=3)  # two decode steps behind the prompt: the second finds what was filled in
        first_misses[restore] = missed(server) - before
    assert first_misses["cold"] >= (N_LAYER - 1) * N_USED
    assert first_misses["prompt"] < first_misses["cold"]
