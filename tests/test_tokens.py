"""Same tokens as stock, for every architecture and prompt length.

Sameness comes in two kinds, and every test says which it means:

same split     stock, started so that it cuts the prompt into the same micro-batches: equal bit for bit, logprobs too
any split      an all-F32 model: greedy tokens are equal however the prompt is cut
"""

from __future__ import annotations

import pytest
from engine_server import DECODE_UBATCH, MIN_TOKENS, PREFILL_UBATCH, Fleet, both

pytestmark = pytest.mark.engine

N_PREDICT = {"qwen4exp": 32, "qwen3moe": 32, "qwen35moe": 32, "gemma": 8}
ARCHITECTURES = list(N_PREDICT)
LENGTHS = [1, MIN_TOKENS - 1, MIN_TOKENS, PREFILL_UBATCH, PREFILL_UBATCH + 1, 7 * PREFILL_UBATCH // 2]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_same_tokens_at_every_prompt_length(fleet: Fleet, prompt, model: str, n: int) -> None:
    """Same split: stock at the prefill micro-batch from MIN_TOKENS on, below it at the decode micro-batch."""
    phased = fleet.phase(model)
    stock = fleet.stock(model, ubatch=PREFILL_UBATCH if n >= MIN_TOKENS else DECODE_UBATCH)
    before = phased.counters()

    of_phase, of_stock = both(phased, stock, prompt(model, n), n=N_PREDICT[model])
    assert of_phase == of_stock

    after = phased.counters()
    switched = int(n >= MIN_TOKENS)
    assert after["entered"] - before["entered"] == switched
    assert after["left"] - before["left"] == switched
    assert after["short"] - before["short"] == 1 - switched
    assert phased.phase()["phase"] == "decode"


@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_another_split_shows(fleet: Fleet, prompt, model: str) -> None:
    """The comparison can fail: stock itself has other logprobs at another micro-batch."""
    large, small = both(fleet.stock(model), fleet.stock(model, ubatch=DECODE_UBATCH), prompt(model, 1000))
    assert all(len(top) == 3 for top in large.logprobs + small.logprobs)
    assert large.logprobs != small.logprobs


def test_same_tokens_at_512_and_2048(fleet: Fleet, prompt) -> None:
    """Same split: the micro-batches that people use, in a prompt of one and a half of the large ones."""
    model = "qwen3moe"
    sizes = {"batch": 2048, "ctx": 4096}
    phased = fleet.phase(model, sizes={"ubatch": 512, **sizes}, prefill_ubatch=2048)
    stock = fleet.stock(model, ubatch=2048, **sizes)
    of_phase, of_stock = both(phased, stock, prompt(model, 2048 + 1024))
    assert of_phase == of_stock
    assert phased.phase()["last_transaction"]["direction"] == "leave"


@pytest.mark.parametrize("n", LENGTHS)
def test_same_tokens_as_stock_at_the_small_ubatch(fleet: Fleet, prompt, n: int) -> None:
    """Any split: what stock answers with the settings that the user gave, without the larger micro-batch."""
    model = "qwen4exp-exact"
    of_phase, of_stock = both(fleet.phase(model), fleet.stock(model, ubatch=DECODE_UBATCH), prompt(model, n), n=48)
    assert of_phase.tokens == of_stock.tokens


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_off_is_stock(fleet: Fleet, prompt, model: str) -> None:
    """Same split: with no variable set the patched engine is stock, and nothing of ours shows."""
    off, stock = fleet.off(model), fleet.stock(model, ubatch=DECODE_UBATCH)
    for n in (1, 7, MIN_TOKENS + 1):
        of_off, of_stock = both(off, stock, prompt(model, n), n=N_PREDICT[model])
        assert of_off == of_stock, f"prompt of {n} tokens"
    assert off.phase() == {"mode": "off", "phase": "decode"}
    assert "llama_phase" not in off.metrics_text()
    assert "llama-phase" not in off.log_text()
