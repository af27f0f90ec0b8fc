"""LLAMA_PHASE_PREFILL_UBATCH=auto: what is planned is what is taken, and the largest that fits is chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, EngineServer, mtp
from expert_servers import ExpertFleet, experts, stopped_at_the_end

pytestmark = pytest.mark.engine

MODEL = "qwen3moe"
MIB = 2**20
SIZES = {"batch": 2048, "ctx": 4096}
AUTO = {"PREFILL_MODE": "transaction", "PREFILL_UBATCH": "auto"}
MTP = mtp(3)


@pytest.fixture
def alone(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    with stopped_at_the_end(servers) as start_any:

        def start(model: str, n_slots: int, *args: str, sizes: dict[str, int] | None = None, **more) -> EngineServer:
            return start_any(model, n_slots, *args, sizes=SIZES | (sizes or {}), **(AUTO | more))

        yield start


def needs(server: EngineServer) -> dict[int, int]:
    """Bytes of compute buffers and ring by candidate."""
    return {
        candidate["ubatch"]: sum(d["compute_buffer_bytes"] + d["ring_bytes"] for d in candidate["devices"])
        for candidate in server.phase()["candidates"]
    }


@pytest.mark.parametrize(
    ("model", "n_slots", "chunk"),
    [("qwen3moe", 8, 0), ("qwen3moe", 0, 0), ("qwen4exp", 8, 0), ("qwen4exp", 8, 100), ("gemma", 0, 0)],
)
def test_what_is_planned_is_taken(alone, servers: ExpertFleet, prompt, model: str, n_slots: int, chunk: int) -> None:
    """Nothing limits it here, so the logical batch does; a prompt then takes what was planned, to the byte, and runs at
    that split. Planning leaves the decode phase alone: a short prompt before and after is stock's."""
    server = alone(model, n_slots, sizes={"batch": 1024}, CHUNK=chunk)
    state = server.phase()
    assert state["ubatch"] == {"now": DECODE_UBATCH, "decode": DECODE_UBATCH, "prefill": 1024}
    assert [(c["ubatch"], c["fits"]) for c in state["candidates"]] == [(512, True), (1024, True)]
    for n, ubatch in ((5, DECODE_UBATCH), (1300, 1024), (5, DECODE_UBATCH)):
        tokens = prompt(model, n)
        assert server.complete(tokens) == servers.stock_answer(model, tokens, 24, ubatch=ubatch, batch=1024)
    planned = sum(d["compute_buffer_bytes"] for d in state["candidates"][-1]["devices"])
    assert sum(d["compute_buffer_bytes"] for d in server.phase()["memory"]["prefill"]) == planned
    assert (server.counters()["entered"], server.counters()["rolled_back"]) == (1, 0)


def test_the_budget_decides(alone, servers: ExpertFleet, prompt) -> None:
    """The largest candidate within the budget, each shortfall in figures and log; the prompt does not roll back."""
    free = alone(MODEL, 8)
    by_ubatch = needs(free)
    assert list(by_ubatch) == [512, 1024, 2048] and sorted(by_ubatch.values()) == list(by_ubatch.values())
    for chosen, next_one in ((512, 1024), (1024, 2048)):
        budget = by_ubatch[chosen] // MIB + 1
        assert budget * MIB < by_ubatch[next_one]
        server = alone(MODEL, 8, BUDGET_MIB=budget)
        state = server.phase()
        assert state["ubatch"]["prefill"] == chosen
        for candidate in state["candidates"]:
            short = max(0, by_ubatch[candidate["ubatch"]] - budget * MIB)
            assert candidate["devices"][0]["short_bytes"] == short
            assert candidate["fits"] == (short == 0)
            verdict = "fits" if short == 0 else "does not fit"
            assert f"prefill ubatch {candidate['ubatch']} {verdict}; CPU: " in server.log_text()
        tokens = prompt(MODEL, 1300)
        assert server.complete(tokens) == servers.stock_answer(MODEL, tokens, 24, ubatch=chosen)
        assert (server.counters()["entered"], server.counters()["rolled_back"]) == (1, 0)
        assert experts(server)["ring"]["layers_streamed"] > 0


def test_nothing_fits(alone, servers: ExpertFleet, prompt) -> None:
    """No prefill phase, said once; answers are those of the decode micro-batch."""
    server = alone(MODEL, 4, BUDGET_MIB=8)
    assert server.phase()["mode"] == "off"
    assert not any(candidate["fits"] for candidate in server.phase()["candidates"])
    assert len(re.findall(f"no prefill phase: no micro-batch above {DECODE_UBATCH} fits", server.log_text())) == 1
    tokens = prompt(MODEL, 600)
    assert server.complete(tokens) == servers.stock_answer(MODEL, tokens, 24, **SIZES)


def test_target_and_draft_choose_together(alone, servers: ExpertFleet, prompt) -> None:
    """A candidate's need is that of both, and so is the micro-batch."""
    model = "qwen4exp"
    target, both = needs(alone(model, 8)), needs(alone(model, 8, *MTP))
    assert all(both[ubatch] > target[ubatch] for ubatch in target)
    budget = target[1024] // MIB + 1
    assert both[512] < budget * MIB < both[1024], "1024 fits the target alone"
    server = alone(model, 8, *MTP, BUDGET_MIB=budget)
    assert server.phase()["ubatch"]["prefill"] == 512
    tokens = prompt(model, 1100)
    of_stock = servers.stock_answer(model, tokens, 24, *MTP, ubatch=PREFILL_UBATCH)
    assert server.complete(tokens) == of_stock
    assert (server.counters()["entered"], server.counters()["rolled_back"]) == (1, 0)


def test_a_fixed_micro_batch_has_no_candidates(alone) -> None:
    server = alone(MODEL, 4, PREFILL_UBATCH=1024)
    assert "candidates" not in server.phase() and server.phase()["ubatch"]["prefill"] == 1024
