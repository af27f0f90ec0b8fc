"""Expert memory that cannot be pinned (LLAMA_PHASE_FAULT=pin.*): such layers are copied to memory that is pinned; with
none left they are streamed through a staging ring in prompts and take the stock path in generation. Answers are
stock's, bit for bit, and log and figures say why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, EngineServer, mtp, wait_until
from expert_servers import LAYER_BYTES, N_LAYER, ExpertFleet, experts, switching_until_the_end

pytestmark = pytest.mark.engine

N_SLOTS = 10
NOTHING = "pin.register:*,pin.copy:*"  # is pinned
MTP = mtp(3)


@pytest.fixture
def start(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    with switching_until_the_end(servers, N_SLOTS) as start_one:
        yield start_one


@pytest.fixture
def check(servers: ExpertFleet, prompt) -> Callable[..., None]:
    """Prompts of one and three micro-batches with generation between them, against stock."""

    def check_answers(server: EngineServer, model: str, *args: str) -> None:
        for n, ubatch in ((300, PREFILL_UBATCH), (6, DECODE_UBATCH), (1300, PREFILL_UBATCH), (6, DECODE_UBATCH)):
            tokens = prompt(model, n, seed=n)
            assert server.complete(tokens) == servers.stock_answer(model, tokens, 24, *args, ubatch=ubatch), n

    return check_answers


def layers_of(figures: list[dict]) -> list[int]:
    return [layer["layer"] for layer in figures]


@pytest.mark.parametrize("model", ["qwen3moe", "qwen4exp", "mixed", "odd-q8_0", "fused"])
def test_layers_are_copied(start, check, model: str) -> None:
    """All of them, with slots and ring as if they had been pinned where they were."""
    server = start(model, FAULT="pin.register:*")
    check(server, model)
    figures = experts(server)
    assert layers_of(figures["copied_layers"]) == list(range(N_LAYER))
    assert figures["copied_layers"][0]["reason"] == "injected fault"
    assert (figures["stock_layers"], figures["staged_layers"]) == ([], [])
    assert figures["slots_per_layer"] == N_SLOTS and figures["pinned_bytes"] > 0
    assert all(layer["looked_up"] for layer in figures["layers"])
    assert figures["ring"]["layers_streamed"] > 3 * N_LAYER
    assert re.search(rf"experts of {N_LAYER} layers, \d+ MiB, are copied to pinned memory", server.log_text())


def test_memory_for_some_copies(start, check) -> None:
    """Pinned, copied and staged layers of one model, and copies of a draft's layer."""
    model = "qwen4exp"
    fault = f"pin.register:2,pin.register:3,pin.register:6,pin.register:{N_LAYER + 1},pin.copy:2"
    pairs = (*MTP[:-1], "1")  # verify batches of two, which the slots are enough for
    server = start(model, *pairs, EXPERT_BATCH=2, FAULT=fault)
    check(server, model, *pairs)
    target, draft = experts(server), experts(server, 1)
    assert (layers_of(target["copied_layers"]), layers_of(target["staged_layers"])) == ([1, 5], [2])
    assert [bool(layer["looked_up"]) for layer in target["layers"]] == [il != 2 for il in range(N_LAYER)]
    assert layers_of(draft["copied_layers"]) == [N_LAYER] and draft["slots"]["looked_up"] > 0


@pytest.mark.parametrize("model", ["qwen3moe", "qwen4exp", "qwen35moe", "mixed", "odd-q8_0", "fused"])
@pytest.mark.parametrize("ring", [2, 3])
def test_no_layer_can_be_pinned(start, check, model: str, ring: int) -> None:
    """No slots, all layers through the staging ring."""
    server = start(model, FAULT=NOTHING, RING=ring)
    check(server, model)
    figures = experts(server)
    assert layers_of(figures["staged_layers"]) == layers_of(figures["layers"]) == list(range(N_LAYER))
    assert all(
        layer["reason"].startswith("its experts could not be pinned: injected fault; nor is there a pinned copy of ")
        for layer in figures["staged_layers"]
    )
    assert (figures["slots_per_layer"], figures["pinned_bytes"], figures["stock_layers"]) == (0, 0, [])
    assert figures["slots"]["looked_up"] == 0 and figures["ring"]["layers_streamed"] > 3 * N_LAYER
    assert "layer 3 is streamed through a staging ring in prompts, and keeps the stock path in generation" in (
        server.log_text()
    )
    assert (server.counters()["left"], server.counters()["rolled_back"]) == (2, 0)


@pytest.mark.parametrize("model", ["qwen3moe", "mixed"])
def test_some_layers_cannot_be_pinned(start, check, model: str) -> None:
    """What is pinned has slots; pinned and staged layers share the ring's regions."""
    server = start(model, FAULT="pin.register:1,pin.register:4,pin.register:5,pin.copy:*", RING=2)
    check(server, model)
    figures = experts(server)
    assert layers_of(figures["staged_layers"]) == [0, 3, 4]
    assert figures["slots_per_layer"] == N_SLOTS
    for layer in figures["layers"]:
        assert bool(layer["looked_up"]) == (layer["layer"] not in (0, 3, 4))
    if model == "qwen3moe":
        assert figures["pinned_bytes"] == (N_LAYER - 3) * LAYER_BYTES


def test_no_staging_ring_either(start, check) -> None:
    """Those layers keep the stock path in both phases, and the reason has both halves; the others go on."""
    model = "qwen3moe"
    server = start(model, FAULT="pin.register:2,pin.copy,pin.staging")
    check(server, model)
    figures = experts(server)
    assert layers_of(figures["stock_layers"]) == [1] and figures["staged_layers"] == []
    assert figures["stock_layers"][0]["reason"].endswith(": injected fault; nor could 32 MiB for a staging ring")
    assert layers_of(figures["layers"]) == [il for il in range(N_LAYER) if il != 1]


@pytest.mark.parametrize("more", [{"PREFILL_MODE": "off"}, {"RING": 0}])
def test_nothing_is_staged_without_a_ring(start, prompt, servers: ExpertFleet, more: dict) -> None:
    model = "qwen3moe"
    server = start(model, FAULT="pin.register:2,pin.copy", **more)
    assert layers_of(experts(server)["stock_layers"]) == [1]
    tokens = prompt(model, 6)
    assert server.complete(tokens) == servers.stock_answer(model, tokens, 24)


def test_a_draft_whose_layer_cannot_be_pinned(start, check) -> None:
    """The MTP layer is the last one of the model. No prompt streams it, so nothing is staged."""
    model = "qwen4exp"
    server = start(model, *MTP, EXPERT_BATCH=1, FAULT=f"pin.register:{N_LAYER + 1},pin.copy")
    check(server, model, *MTP)
    assert (experts(server)["staged_layers"], experts(server)["slots_per_layer"]) == ([], N_SLOTS)
    draft = experts(server, 1)
    assert (layers_of(draft["stock_layers"]), draft["staged_layers"]) == ([N_LAYER], [])


def test_cancel_in_the_middle_of_a_staged_stream(start, check, prompt) -> None:
    model = "qwen3moe"
    server = start(model, FAULT=NOTHING, sizes={"ctx": 8192})
    for count in range(1, 4):
        with server.stream(prompt(model, 7000, seed=9)):
            wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
        wait_until(lambda n=count: server.counters()["aborted"] == n, "cancelled")
    wait_until(lambda: experts(server)["ring_bytes"] == 0, "the ring is given back")
    tokens = prompt(model, 600)
    first = server.complete(tokens)
    assert server.complete(tokens) == first
