"""Behind a prompt the slots are filled in front of the tokens that follow, a part at a time, and no answer differs.

Plain "==" of answers: as stock at the same split, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_server import DECODE_UBATCH, MIN_TOKENS, PREFILL_UBATCH, EngineServer, mtp
from expert_servers import EXPERT_BYTES, N_EXPERT, N_LAYER, N_USED, ExpertFleet, experts

pytestmark = pytest.mark.engine

N_SLOTS = 14
MIB = 2**20
STEP_BYTES = MIB // EXPERT_BYTES * EXPERT_BYTES  # whole experts, of one size in these models
WARM = 40  # tokens after which all slots are taken
LONG = 700


def refill(server: EngineServer, member: int = 0) -> dict[str, int]:
    return experts(server, member)["refill"]


def check(servers: ExpertFleet, server: EngineServer, model: str, tokens: list[int], n: int, *args: str) -> Any:
    ubatch = PREFILL_UBATCH if len(tokens) >= MIN_TOKENS else DECODE_UBATCH
    answer = server.complete(tokens, n=n)
    assert answer == servers.stock_answer(model, tokens, n, *args, ubatch=ubatch)
    return answer


@pytest.mark.parametrize("restore", ["snapshot", "prompt"])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_spread_over_several_tokens(servers: ExpertFleet, prompt, model: str, restore: str) -> None:
    """The first step behind the prompt goes without, each one after it brings a part, then all is done."""
    server = servers.switching(model, N_SLOTS, RESTORE=restore, REFILL_MIB=1)
    check(servers, server, model, prompt(model, 7), WARM)
    tokens, before = prompt(model, LONG), refill(server)["copied_bytes"]
    wanted = N_SLOTS * N_LAYER * EXPERT_BYTES
    for n, batches in ((1, 0), (2, 0), (3, 1), (4, 2)):
        check(servers, server, model, tokens, n)
        state = refill(server)
        assert state["wanted_bytes"] == wanted
        assert (state["batches"], state["left_bytes"]) == (batches, wanted - batches * STEP_BYTES)
        assert state["copied_bytes"] - before <= batches * STEP_BYTES
        before = state["copied_bytes"]
    check(servers, server, model, tokens, 24)
    state = refill(server)
    assert (state["batches"], state["left_bytes"]) == (-(-wanted // STEP_BYTES), 0)
    assert 0 < state["copied_bytes"] - before < wanted, "what tokens brought is not copied again"
    check(servers, server, model, prompt(model, 7), WARM)
    assert refill(server) == state, "a short prompt refills nothing"


@pytest.mark.parametrize("restore", ["snapshot", "prompt"])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_a_prompt_in_the_middle(servers: ExpertFleet, prompt, model: str, restore: str) -> None:
    """Long or short prompts before all is filled: a long one begins anew and forgets none that had no turn yet."""
    server = servers.switching(model, N_EXPERT, RESTORE=restore, REFILL_MIB=1)
    check(servers, server, model, prompt(model, 7), WARM)
    wanted = 0
    for seed in range(4):
        check(servers, server, model, prompt(model, LONG, seed=seed), 3 + seed)
        state = refill(server)
        assert state["left_bytes"] > 0 and state["wanted_bytes"] >= wanted
        wanted = state["wanted_bytes"]
    left = state["left_bytes"]
    check(servers, server, model, prompt(model, 7), 4)
    assert 0 < refill(server)["left_bytes"] < left, "a short prompt goes on with it"
    check(servers, server, model, prompt(model, LONG), WARM)
    assert refill(server)["left_bytes"] == 0


def test_the_log_says_what_is_left(servers: ExpertFleet, prompt) -> None:
    model = "qwen3moe"
    server = servers.switching(model, N_SLOTS, "-lv", "4", RESTORE="snapshot", REFILL_MIB=1)
    check(servers, server, model, prompt(model, 7), WARM)
    wanted = N_SLOTS * N_LAYER * EXPERT_BYTES
    check(servers, server, model, prompt(model, LONG), 3)
    assert f", {wanted / MIB:.0f} MiB of experts to fill the slots with" in server.log_text()
    assert "slots filled" not in server.log_text()
    check(servers, server, model, prompt(model, 7), 24)
    assert f"slots filled in front of {-(-wanted // STEP_BYTES)} micro-batches" in server.log_text()


@pytest.mark.parametrize("restore", ["cold", "snapshot", "prompt"])
def test_all_at_once(servers: ExpertFleet, prompt, restore: str) -> None:
    """LLAMA_PHASE_REFILL_MIB=0: before the first step, and nothing is there twice; a cold start fills nothing."""
    model = "qwen3moe"
    server = servers.switching(model, N_SLOTS, RESTORE=restore, REFILL_MIB=0)
    check(servers, server, model, prompt(model, 7), WARM)
    before = refill(server)["copied"]
    check(servers, server, model, prompt(model, LONG), 1)
    state, wanted = refill(server), 0 if restore == "cold" else N_SLOTS * N_LAYER
    assert (state["left_bytes"], state["wanted_bytes"]) == (0, wanted * EXPERT_BYTES)
    assert state["copied"] - before == wanted
    check(servers, server, model, prompt(model, LONG), 24)


@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
def test_with_a_draft(servers: ExpertFleet, prompt, model: str) -> None:
    """The slots of the draft's context are filled by the same rule."""
    args = mtp(1)
    server = servers.switching(model, N_SLOTS, *args, EXPERT_BATCH=2, RESTORE="prompt", REFILL_MIB=1)
    check(servers, server, model, prompt(model, 5), WARM, *args)
    check(servers, server, model, prompt(model, LONG), 3, *args)
    assert refill(server)["left_bytes"] > 0
    check(servers, server, model, prompt(model, LONG), 48, *args)
    for member in (0, 1):
        state = refill(server, member)
        assert state["left_bytes"] == 0 < state["wanted_bytes"] and state["batches"] > 0
    assert refill(server, 0)["copied"] > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_a_tail_from_empty_slots(servers: ExpertFleet, prompt, batch: int) -> None:
    """The prompt's last tokens, or the first step where they were not cut off, look up and copy what they need."""
    model = "qwen35moe" if batch >= 4 else "qwen3moe"
    server = servers.switching(model, batch * N_USED, EXPERT_BATCH=batch, REFILL_MIB=1, PREFETCH=0)
    check(servers, server, model, prompt(model, 7), WARM)
    before = experts(server)["slots"]
    check(servers, server, model, prompt(model, LONG), 1 if batch >= 4 else 2)
    after = experts(server)["slots"]
    assert after["missed"] - before["missed"] >= N_USED * N_LAYER
    assert after["evicted"] == before["evicted"], "they are empty"
    assert refill(server)["batches"] == 0
