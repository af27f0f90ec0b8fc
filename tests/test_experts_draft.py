"""An MTP draft with expert slots: what its prompts take, and its answers beside a prompt of another sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_server import EngineServer, assert_same_but_for_ties, mtp, wait_until
from expert_servers import LAYER_BYTES, N_LAYER, N_USED, ExpertFleet, experts, switching_until_the_end

pytestmark = pytest.mark.engine

MODELS = ["qwen4exp", "qwen35moe"]
N_SLOTS = 16
RESERVE = "enter.reserve_prefill_buffers"


@pytest.fixture
def start(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    with switching_until_the_end(servers, N_SLOTS) as start_one:
        yield start_one


def bytes_of(server: EngineServer, step: str) -> int:
    """Of the last way into the prefill phase."""
    return next(s["bytes"] for s in server.phase()["last_enter_steps"] if s["step"] == step)


@pytest.mark.parametrize("model", MODELS)
def test_a_draft_has_no_ring(start, servers: ExpertFleet, prompt, model: str) -> None:
    """Its prompts write K/V and compute no experts: the target's ring alone is planned and allocated, and the draft's
    compute buffers have no room for the experts of a prompt."""
    tokens, sizes = prompt(model, 1100), {"ctx": 1536}
    plain, drafting = (start(model, *args, EXPERT_BATCH=4, sizes=sizes) for args in ((), mtp(3)))
    for server, args in ((plain, ()), (drafting, mtp(3))):
        assert server.complete(tokens) == servers.stock_answer(model, tokens, 24, *args, ubatch=512, **sizes)
        assert bytes_of(server, "enter.allocate_ring") == 3 * LAYER_BYTES
    assert experts(drafting)["ring"]["layers_streamed"] == 3 * N_LAYER
    assert experts(drafting, 1)["ring"]["layers_streamed"] == 0
    if model == "qwen35moe":  # the indexer of the other needs more than the experts
        of_draft = bytes_of(drafting, RESERVE) - bytes_of(plain, RESERVE)
        mask, of_experts = 512 * 1536 * 2, 512 * 256 * N_USED * 4
        assert 0 < of_draft < mask + 2 * of_experts

    planned = start(model, *mtp(3), EXPERT_BATCH=4, PREFILL_UBATCH="auto", RING=2, sizes=sizes)
    assert planned.complete(tokens).tokens
    [candidate] = planned.phase()["candidates"]
    assert candidate["devices"][0]["ring_bytes"] == 2 * LAYER_BYTES == bytes_of(planned, "enter.allocate_ring")
    assert candidate["devices"][0]["compute_buffer_bytes"] == bytes_of(planned, RESERVE)


@pytest.mark.parametrize("model", MODELS)
def test_drafts_beside_a_prompt(start, servers: ExpertFleet, prompt, model: str) -> None:
    """Any split, all-F32: one sequence drafts and verifies while the prompt of another is in the prefill phase, where
    neither slots nor a ring serve the draft."""
    exact = f"{model}-exact"
    server = start(exact, *mtp(3), EXPERT_BATCH=4, DRAFT_SLOTS=N_SLOTS, sizes={"ctx": 16384, "parallel": 2})
    short, long = prompt(exact, 20, seed=1), prompt(exact, 7000, seed=2)
    expected = servers.stock_answer(exact, short, 400, ctx=16384, parallel=2)
    in_prefill = 0
    with server.stream(short, n=400, id_slot=0) as pieces:
        tokens = list(next(pieces)["tokens"])
        with server.stream(long, n=1, id_slot=1):
            wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
            for piece in pieces:
                tokens += piece["tokens"]
                in_prefill += server.phase()["phase"] == "prefill"
    assert in_prefill > 3
    assert_same_but_for_ties(tokens, expected)
    assert experts(server, 1)["slots_per_layer"] == N_SLOTS
