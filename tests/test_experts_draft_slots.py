"""How many slots an MTP draft's layers get: all experts when they fit, a number, or as many as the target's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from engine_server import PREFILL_UBATCH, EngineServer, mtp
from expert_servers import (
    EXPERT_BYTES,
    LAYER_BYTES,
    N_EXPERT,
    N_LAYER,
    N_USED,
    TRANSACTION,
    ExpertFleet,
    experts,
    stopped_at_the_end,
)

pytestmark = pytest.mark.engine

MODEL = "qwen4exp"
MODELS = [MODEL, "qwen35moe"]
MTP = mtp(3)
LOG = ("--log-verbosity", "4")  # of llama.cpp's own lines
BATCH = 4
N_SLOTS = BATCH * N_USED
MIB = 2**20


@pytest.fixture
def start(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    with stopped_at_the_end(servers) as start_one:
        yield lambda n_slots, **more: start_one(
            more.pop("model", MODEL), n_slots, *MTP, *LOG, **TRANSACTION | {"EXPERT_BATCH": BATCH} | more
        )


def refusal(start: Callable[..., EngineServer], n_slots: int | str, **more: object) -> str:
    with pytest.raises(AssertionError, match="server ended with 1") as caught:
        start(n_slots, **more)
    return str(caught.value)


def slots_of(server: EngineServer) -> list[int]:
    return [member["slots_per_layer"] for member in server.phase()["experts"]]


def compute_bytes(start: Callable[..., EngineServer], prompt) -> int:
    """Of target and draft in the decode phase, without slots."""
    server = start(0)
    server.complete(prompt(MODEL, 1), n=1)
    return sum(device["compute_buffer_bytes"] for device in server.phase()["memory"]["decode"])


@pytest.mark.parametrize("restore", ["cold", "prompt"])
@pytest.mark.parametrize("model", MODELS)
def test_all_experts_are_resident(start, servers: ExpertFleet, prompt, model: str, restore: str) -> None:
    """Each is copied once between two prompts, by the fetch operator or by the refill, and none is evicted."""
    server = start(N_SLOTS, model=model, RESTORE=restore)
    assert slots_of(server) == [N_SLOTS, N_EXPERT] and "note" not in experts(server, 1)
    assert experts(server, 1)["slot_bytes"] == LAYER_BYTES
    assert f"{N_EXPERT} slots for each of 1 layers of the draft, all its experts" in server.log_text()
    for n_switches in (1, 2, 3):
        before = experts(server, 1)
        for n, ubatch in ((1100, PREFILL_UBATCH), (6, 64)):
            tokens = prompt(model, n, seed=n_switches)
            of_stock = servers.stock_answer(model, tokens, 64, *MTP, ubatch=ubatch)
            assert server.complete(tokens, n=64) == of_stock and of_stock.timings["draft_n"] > 0
        after = experts(server, 1)
        assert server.counters() | {"left": n_switches, "rolled_back": 0} == server.counters()
        assert slots_of(server) == [N_SLOTS, N_EXPERT]
        copied = [figures["slots"]["missed"] + figures["refill"]["copied"] for figures in (before, after)]
        # the way into the prefill phase emptied the slots
        assert copied[1] - copied[0] <= N_EXPERT
        assert after["slots"]["looked_up"] - before["slots"]["looked_up"] > N_EXPERT
    assert experts(server, 1)["slots"]["evicted"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_the_number_it_was_given(start, servers: ExpertFleet, prompt, model: str) -> None:
    server = start(N_SLOTS, model=model, DRAFT_SLOTS=N_SLOTS + 1)
    assert slots_of(server) == [N_SLOTS, N_SLOTS + 1]
    why = f"the draft has {N_SLOTS + 1} slots for {N_EXPERT} experts: LLAMA_PHASE_DRAFT_SLOTS={N_SLOTS + 1}"
    assert experts(server, 1)["note"] == why and why in server.log_text() and "note" not in experts(server)
    tokens = prompt(model, 1100, seed=1)
    assert server.complete(tokens, n=64) == servers.stock_answer(model, tokens, 64, *MTP, ubatch=PREFILL_UBATCH)
    assert slots_of(server) == [N_SLOTS, N_SLOTS + 1] and experts(server, 1)["note"] == why
    assert experts(server, 1)["slots"]["evicted"] > 0, "fewer than experts"


def test_numbers_that_are_refused(start) -> None:
    message = refusal(start, N_SLOTS, DRAFT_SLOTS=N_SLOTS - 1)
    assert f"LLAMA_PHASE_DRAFT_SLOTS={N_SLOTS - 1} is too few: {N_SLOTS} are needed" in message
    assert f"LLAMA_PHASE_EXPERT_BATCH={BATCH}" in message


def test_without_slots_it_has_none(start) -> None:
    assert "experts" not in start(0, DRAFT_SLOTS=N_SLOTS).phase()


def test_too_little_room_for_all(start, servers: ExpertFleet, prompt) -> None:
    """As many as the target, and the reason; a number that does not fit is refused, with what fits."""
    compute = compute_bytes(start, prompt)
    # whole MiB that leave room for so many of both, and not for all of the draft's
    budget, n = next(
        (budget, n)
        for budget in range(compute // MIB, compute // MIB + 20)
        for n in range(N_SLOTS, N_EXPERT - 1)
        if 0 <= budget * MIB - compute - n * (N_LAYER + 1) * EXPERT_BYTES < (N_EXPERT - 1 - n) * EXPERT_BYTES
    )
    server = start(n, BUDGET_MIB=budget)
    assert slots_of(server) == [n, n]
    note = experts(server, 1)["note"]
    assert re.fullmatch(rf"the draft has {n} slots for {N_EXPERT} experts: CPU has room for \d+ MiB, .*", note), note
    assert note in server.log_text()
    tokens = prompt(MODEL, 6)
    assert server.complete(tokens, n=48) == servers.stock_answer(MODEL, tokens, 48, *MTP)

    message = refusal(start, n, BUDGET_MIB=budget, DRAFT_SLOTS=N_EXPERT)
    found = re.search(
        r"32 slots do not fit for the draft: CPU has room .* so at most (\d+) fit and at least 16", message
    )
    assert found and n <= int(found[1]) < N_EXPERT, message
    assert slots_of(start(n, BUDGET_MIB=budget, DRAFT_SLOTS=found[1])) == [n, int(found[1])]


@pytest.mark.parametrize("draft_slots", [N_USED, 20, N_EXPERT])
def test_auto_leaves_room_for_the_number(start, prompt, draft_slots: int) -> None:
    compute = compute_bytes(start, prompt)
    budget = compute // MIB + 8
    server = start("auto", EXPERT_BATCH=1, BUDGET_MIB=budget, DRAFT_SLOTS=draft_slots)
    target, draft = slots_of(server)
    assert draft == draft_slots
    room = budget * MIB - compute - draft * EXPERT_BYTES
    assert N_USED < target <= room // (N_LAYER * EXPERT_BYTES) < N_EXPERT


def test_auto_without_a_number_leaves_room_for_as_many(start, prompt) -> None:
    """And what is left over is the draft's, too."""
    compute = compute_bytes(start, prompt)
    target, draft = slots_of(start("auto", EXPERT_BATCH=1, BUDGET_MIB=compute // MIB + 8))
    room = (compute // MIB + 8) * MIB - compute
    assert N_USED < target <= draft and target <= room // ((N_LAYER + 1) * EXPERT_BYTES) < N_EXPERT
    assert draft <= (room - target * N_LAYER * EXPERT_BYTES) // EXPERT_BYTES
    assert slots_of(start("auto", EXPERT_BATCH=1)) == [N_EXPERT, N_EXPERT]
