"""Several slots at once: batches then mix prompts and generation. "Any split": see test_tokens.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_server import MIN_TOKENS, Fleet, assert_same_but_for_ties, wait_until

pytestmark = pytest.mark.engine

LENGTHS = [900, 40, 600, 1300]


@pytest.mark.parametrize("n_slots", [2, 4])
@pytest.mark.parametrize("model", ["qwen4exp-exact", "qwen3moe-exact"])
def test_parallel_slots(fleet: Fleet, prompt, model: str, n_slots: int) -> None:
    """Any split: long and short prompts at once, each with the tokens that stock gives it alone."""
    phased = fleet.phase(model, sizes={"parallel": n_slots, "ctx": 2048 * n_slots})
    stock = fleet.stock(model)
    prompts = [prompt(model, n, seed=n) for n in LENGTHS[:n_slots]]

    before = phased.counters()
    answers = phased.complete_all(prompts)
    for answer, tokens in zip(answers, prompts, strict=True):
        assert_same_but_for_ties(answer.tokens, stock.complete(tokens))

    after = phased.counters()
    n_long = sum(n >= MIN_TOKENS for n in LENGTHS[:n_slots])
    assert 1 <= after["entered"] - before["entered"] <= n_long, "prompts that overlap share a transaction"
    assert after["left"] == after["entered"]
    assert phased.phase()["phase"] == "decode"


def test_prompt_arrives_while_another_slot_generates(fleet: Fleet, prompt) -> None:
    """Any split: the generating slot goes on inside the prefill phase, and both answers are right."""
    model = "qwen4exp-exact"
    phased = fleet.phase(model, sizes={"parallel": 2, "ctx": 8192})
    stock = fleet.stock(model)
    first, second = prompt(model, 300, seed=5), prompt(model, 1500, seed=6)
    with phased.stream(first, n=200) as pieces, ThreadPoolExecutor(1) as pool:
        begun = next(pieces)
        late = pool.submit(phased.complete, second)
        tokens = begun["tokens"] + [token for piece in pieces if not piece["stop"] for token in piece["tokens"]]
        assert_same_but_for_ties(tokens, stock.complete(first, n=200))
        assert_same_but_for_ties(late.result().tokens, stock.complete(second))


def test_cancel_of_one_prompt_while_another_slot_goes_on(fleet: Fleet, prompt) -> None:
    """Any split: the second prompt begins in the batch that ends the first, so that they share a phase; its cancel ends
    the phase under the first one's generation."""
    model = "qwen4exp-exact"
    phased = fleet.phase(model, sizes={"parallel": 2, "ctx": 8192})
    stock = fleet.stock(model)
    before = phased.counters()
    kept = prompt(model, 2000, seed=7)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(phased.complete, kept, n=100)
        wait_until(lambda: phased.counters()["prompts"] == before["prompts"] + 1, "the first prompt in progress")
        with phased.stream(prompt(model, 3500, seed=8)):
            wait_until(lambda: phased.counters()["prompts"] == before["prompts"] + 2, "the second prompt in progress")
            assert phased.phase()["phase"] == "prefill"
        assert_same_but_for_ties(answer.result().tokens, stock.complete(kept, n=100))
    after = phased.counters()
    assert after["aborted"] - before["aborted"] == 1
    assert after["left"] == after["entered"] == before["entered"] + 1
    assert phased.phase()["phase"] == "decode"
