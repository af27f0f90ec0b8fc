"""Same tokens as stock when a prompt extends what a slot already holds, after a cancel, and across a context shift.

"Same split" and "any split": see test_tokens.py.
"""

from __future__ import annotations

import pytest
from engine_server import MIN_TOKENS, EngineServer, Fleet, both, wait_until

pytestmark = pytest.mark.engine

N_FIRST = 900
EXTENSIONS = {"many": MIN_TOKENS + 150, "few": 40, "one": 1, "identical": 0}


def in_decode(server: EngineServer) -> None:
    wait_until(lambda: server.phase()["phase"] == "decode", "back in the decode phase")


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_prefix_reuse(fleet: Fleet, prompt, model: str, extension: str) -> None:
    """Same split: a second prompt begins with the first. The switch depends on its new tokens, not on its length."""
    phased, stock = fleet.phase(model), fleet.stock(model)
    first, second = prompt(model, N_FIRST), prompt(model, N_FIRST + EXTENSIONS[extension])

    # an answer of one token is not in the cache, so the second prompt has no fork point to go back to but its own end
    assert phased.complete(first, n=1) == stock.complete(first, n=1)
    before = phased.counters()
    of_phase, of_stock = both(phased, stock, second, cache=True)
    after = phased.counters()

    assert of_phase == of_stock
    assert of_phase.n_cached == of_stock.n_cached > 0
    assert after["entered"] - before["entered"] == int(of_phase.n_new >= MIN_TOKENS) == int(extension == "many")


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("model", ["qwen4exp-exact", "qwen3moe-exact"])
def test_reuse_that_leaves_one_new_token_equals_a_cold_run(fleet: Fleet, prompt, model: str, extension: str) -> None:
    """Any split: with the prefix taken from the slot, and computed afresh by stock."""
    phased, stock = fleet.phase(model), fleet.stock(model)
    second = prompt(model, N_FIRST + EXTENSIONS[extension])
    phased.complete(prompt(model, N_FIRST), n=1)
    warm = phased.complete(second, cache=True)
    assert warm.n_cached > 0
    assert warm.tokens == stock.complete(second).tokens


def test_short_follow_up_pays_no_switch(fleet: Fleet, prompt) -> None:
    """Follow-ups of fewer new tokens than MIN_TOKENS, on a long context: none switches; one at MIN_TOKENS does."""
    model = "qwen3moe"
    phased = fleet.phase(model)
    phased.complete(prompt(model, N_FIRST), n=1)
    for n_new, switches in ((170, 0), (200, 0), (MIN_TOKENS - 1, 0), (MIN_TOKENS, 1)):
        before = phased.counters()
        tokens = [*prompt(model, N_FIRST), *prompt(model, n_new, seed=n_new)]
        assert phased.complete(tokens, n=1, cache=True).n_new == n_new
        assert phased.counters()["entered"] - before["entered"] == switches, f"{n_new} new tokens"


@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_reuse_does_not_collapse_in_a_growing_conversation(fleet: Fleet, prompt, model: str) -> None:
    """Same split: five turns, some long and some short; each reuses all that the turn before it left in the slot."""
    phased, stock = fleet.phase(model), fleet.stock(model)
    history: list[int] = []
    for turn, n_new in enumerate((N_FIRST, 60, 300, 100, 700)):
        history += prompt(model, n_new, seed=20 + turn)
        of_phase, of_stock = both(phased, stock, history, n=16, cache=turn > 0)
        assert of_phase == of_stock, f"turn {turn + 1}"
        # the token sampled last was never decoded
        assert of_phase.n_new == n_new + (turn > 0), f"turn {turn + 1}"
        history += of_phase.tokens


@pytest.mark.parametrize("way", ["slot file", "host prompt cache"])
@pytest.mark.parametrize("model", ["qwen4exp-exact", "qwen4exp-no-ple-exact"])
def test_restored_state_gives_the_logits_of_one_never_saved(one_server, prompt, tmp_path, model: str, way: str) -> None:
    """Same split: a context longer than what sparse attention selects is saved, overwritten and restored; bit for bit
    the answer of a slot never disturbed. Stock drops the indexer's positions of the model without n-gram keys."""
    server = one_server(model, "--slot-save-path", str(tmp_path), "--cache-ram", "256" if way != "slot file" else "0")
    context, other = prompt(model, 1200), prompt(model, 300, seed=2)
    question = [*context, *prompt(model, 30, seed=3)]
    server.complete(context, n=1)
    undisturbed = server.complete(question, cache=True)

    server.complete(context, n=1)
    if way == "slot file":
        assert server.http.post("/slots/0?action=save", json={"filename": "context"}).status_code == 200
        server.complete(other, n=1)
        assert server.http.post("/slots/0?action=restore", json={"filename": "context"}).status_code == 200
    else:
        server.complete(other, n=1, cache=True)
    restored = server.complete(question, cache=True)
    assert restored.n_cached == undisturbed.n_cached == len(context)
    assert restored == undisturbed


def test_conversations_in_turn_from_the_host_prompt_cache(fleet: Fleet, prompt) -> None:
    """Any split: one slot, two conversations in turn, so that each is saved to host RAM and restored. One of them is
    further on than the sparse attention's selection, with long and short turns."""
    model = "qwen4exp-exact"
    phased = fleet.phase(model, "--cache-ram", "256", "--cache-idle-slots")
    cold = fleet.stock(model)
    histories: list[list[int]] = [[], []]
    for turn, n_new in enumerate((700, 40, 300)):
        for i, history in enumerate(histories):
            history += prompt(model, n_new, seed=40 + 10 * i + turn)
            warm = phased.complete(history, cache=True)
            assert warm.tokens == cold.complete(history).tokens, f"conversation {i}, turn {turn + 1}"
            assert turn == 0 or warm.n_cached > 0
            history += warm.tokens


def test_cancel_in_the_middle_of_a_prompt(fleet: Fleet, prompt) -> None:
    """Any split: the connection closes while the prompt is processed; the phase ends at once, and the next request is
    right, both afresh and on the part that was processed."""
    model = "qwen4exp-exact"
    sizes = {"ctx": 8192}
    phased, stock = fleet.phase(model, sizes=sizes), fleet.stock(model, **sizes)
    long, other = prompt(model, 6000), prompt(model, 1000, seed=2)
    for follow_up, cache in ((other, False), (long[:2500], True)):
        before = phased.counters()
        with phased.stream(long, cache=True):
            wait_until(lambda: phased.phase()["phase"] == "prefill", "in the prefill phase")
        in_decode(phased)
        after = phased.counters()
        assert after["aborted"] - before["aborted"] == 1
        assert after["left"] == after["entered"] == before["entered"] + 1
        assert phased.complete(follow_up, cache=cache).tokens == stock.complete(follow_up).tokens


def test_cancel_while_generating(fleet: Fleet, prompt) -> None:
    """Same split: nothing to leave any more; the next request is right."""
    model = "qwen3moe"
    phased, stock = fleet.phase(model), fleet.stock(model)
    before = phased.counters()
    with phased.stream(prompt(model, 600), n=2000) as pieces:
        next(pieces)
        assert phased.phase()["phase"] == "decode"
    of_phase, of_stock = both(phased, stock, prompt(model, 1000, seed=2))
    assert of_phase == of_stock
    after = phased.counters()
    assert after["aborted"] == before["aborted"]
    assert after["left"] == after["entered"] == before["entered"] + 2


def test_context_shift(fleet: Fleet, prompt) -> None:
    """Same split: generation runs over the end of the context, which is shifted; a long prompt follows in the slot."""
    model = "qwen3moe"
    sizes = {"ctx": 1024}
    phased = fleet.phase(model, "--context-shift", sizes=sizes)
    stock = fleet.stock(model, "--context-shift", **sizes)
    of_phase, of_stock = both(phased, stock, prompt(model, 800), n=500)
    assert len(of_phase.tokens) == 500, "more than the context holds"
    assert of_phase == of_stock

    of_phase, of_stock = both(phased, stock, prompt(model, 700, seed=2), cache=True)
    assert of_phase == of_stock
    assert phased.phase()["phase"] == "decode"
