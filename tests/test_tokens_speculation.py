"""Speculation: an MTP draft context enters and leaves with its target. Kinds of sameness: see test_tokens.py."""

from __future__ import annotations

import pytest
from engine_server import DECODE_UBATCH, MIN_TOKENS, PREFILL_UBATCH, Fleet, both, mtp

pytestmark = pytest.mark.engine

MTP = mtp(3)
NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "6")


@pytest.mark.parametrize("n", [1, MIN_TOKENS - 1, MIN_TOKENS, PREFILL_UBATCH + 1, 7 * PREFILL_UBATCH // 2])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
def test_mtp_same_tokens(fleet: Fleet, prompt, model: str, n: int) -> None:
    """Same split: stock with MTP, at the micro-batch of the phase that the prompt runs in."""
    phased = fleet.phase(model, *MTP)
    stock = fleet.stock(model, *MTP, ubatch=PREFILL_UBATCH if n >= MIN_TOKENS else DECODE_UBATCH)
    before = phased.counters()
    of_phase, of_stock = both(phased, stock, prompt(model, n), n=48)
    assert of_phase == of_stock
    assert of_phase.timings["draft_n"] == of_stock.timings["draft_n"] > 0
    assert of_phase.timings["draft_n_accepted"] == of_stock.timings["draft_n_accepted"]

    state = phased.phase()
    assert state["contexts"] == 2
    assert state["counters"]["entered"] - before["entered"] == int(n >= MIN_TOKENS)
    assert state["counters"]["left"] == state["counters"]["entered"]


@pytest.mark.parametrize("extension", [400, 40, 1, 0])
def test_mtp_prefix_reuse(fleet: Fleet, prompt, extension: int) -> None:
    """Same split: a second prompt extends the first by many, few, one or no tokens."""
    model = "qwen4exp"
    phased, stock = fleet.phase(model, *MTP), fleet.stock(model, *MTP)
    first, second = prompt(model, 900), prompt(model, 900 + extension)
    of_phase, of_stock = both(phased, stock, first, n=1)
    assert of_phase == of_stock
    of_phase, of_stock = both(phased, stock, second, cache=True)
    assert of_phase == of_stock
    assert of_phase.n_cached == of_stock.n_cached > 0


def test_mtp_does_not_change_the_text(fleet: Fleet, prompt) -> None:
    """Any split: with a draft and without."""
    model = "qwen4exp-exact"
    for n in (40, 1000):
        of_mtp, of_stock = both(fleet.phase(model, *MTP), fleet.stock(model), prompt(model, n), n=48)
        assert of_mtp.tokens == of_stock.tokens
        assert of_mtp.timings["draft_n_accepted"] > 0


def test_mtp_with_two_slots(fleet: Fleet, prompt) -> None:
    """Any split: two long prompts at once, target and draft together."""
    model = "qwen4exp-exact"
    phased = fleet.phase(model, *MTP, sizes={"parallel": 2, "ctx": 4096})
    stock = fleet.stock(model)
    prompts = [prompt(model, n, seed=n) for n in (900, 600)]
    answers = phased.complete_all(prompts, n=32)
    assert [answer.tokens for answer in answers] == [stock.complete(tokens, n=32).tokens for tokens in prompts]
    counters = phased.counters()
    assert counters["left"] == counters["entered"] > 0


def test_ngram_speculation(fleet: Fleet, prompt) -> None:
    """Any split: drafts that come from the prompt itself, which holds an answer to its own end."""
    model = "qwen3moe-exact"
    question = prompt(model, 150)
    answer = fleet.stock(model).complete(question, n=48).tokens
    tokens = [*question, *answer] * 3 + question
    of_ngram, of_stock = both(fleet.phase(model, *NGRAM), fleet.stock(model), tokens, n=48)
    assert of_ngram.tokens == of_stock.tokens
    assert of_ngram.timings["draft_n"] > 0
