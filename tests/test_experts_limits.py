"""How many slots and ring entries there are: what is refused, what `auto` picks, what the figures say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, EngineServer, mtp, wait_until
from expert_servers import (
    EXPERT_BYTES,
    LAYER_BYTES,
    N_EXPERT,
    N_LAYER,
    N_USED,
    RAW,
    TRANSACTION,
    ExpertFleet,
    experts,
    stopped_at_the_end,
)

pytestmark = pytest.mark.engine

MODEL = "qwen3moe"
MIB = 2**20
MTP = mtp(3)


@pytest.fixture
def alone(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    with stopped_at_the_end(servers) as start:
        yield start


def refusal_of(alone: Callable[..., EngineServer], model: str, n_slots: int | str, *args: str, **more) -> str:
    with pytest.raises(AssertionError, match="server ended with 1") as caught:
        alone(model, n_slots, *args, **more)
    return str(caught.value)


def refusal(alone: Callable[..., EngineServer], n_slots: int | str, **more) -> str:
    return refusal_of(alone, MODEL, n_slots, **more)


def compute_bytes(server: EngineServer, phase: str) -> int:
    return sum(device["compute_buffer_bytes"] for device in server.phase()["memory"][phase])


@pytest.mark.parametrize(("n_slots", "batch", "needed"), [(3, 1, 4), (4, 2, 8), (27, 7, 28), (31, 8, 32), (31, 64, 32)])
def test_too_few_slots(alone, n_slots: int, batch: int, needed: int) -> None:
    """The number needed is in the message: experts per token x EXPERT_BATCH, at most all experts."""
    message = refusal(alone, n_slots, EXPERT_BATCH=batch)
    assert f"LLAMA_PHASE_EXPERT_SLOTS={n_slots} is too few: {needed} are needed" in message
    assert f"LLAMA_PHASE_EXPERT_BATCH={batch}" in message


def test_more_slots_than_experts(servers: ExpertFleet, prompt) -> None:
    """As many as there are experts; an EXPERT_BATCH that could use more needs no more."""
    server = servers.slots(MODEL, 1000, EXPERT_BATCH=64)
    assert experts(server)["slots_per_layer"] == N_EXPERT
    for n in (40, 64, 65):  # 256 ids and more, of 32 experts
        tokens = prompt(MODEL, n)
        assert server.complete(tokens, n=8) == servers.stock_answer(MODEL, tokens, 8)


def test_too_many_slots_for_the_budget(alone) -> None:
    """The message says how many fit, and that many start."""
    message = refusal(alone, N_EXPERT, BUDGET_MIB=10)
    found = re.search(r"32 slots do not fit: CPU has room .* so at most (\d+) fit and at least 4 are needed", message)
    assert found, message
    fits = int(found[1])
    assert 4 < fits < N_EXPERT
    assert experts(alone(MODEL, fits, BUDGET_MIB=10))["slots_per_layer"] == fits
    assert f"at most {fits} fit" in refusal(alone, fits + 1, BUDGET_MIB=10)


@pytest.mark.parametrize("budget", [7, 10, 13])
def test_auto_is_what_the_budget_leaves(alone, servers: ExpertFleet, prompt, budget: int) -> None:
    without = alone(MODEL, 0, **TRANSACTION)
    without.complete(prompt(MODEL, 1), n=1)
    room = budget * MIB - compute_bytes(without, "decode")
    server = alone(MODEL, "auto", BUDGET_MIB=budget)
    figures = experts(server)
    assert figures["slots_per_layer"] == room // (N_LAYER * EXPERT_BYTES)
    assert figures["slot_bytes"] == figures["slots_per_layer"] * N_LAYER * EXPERT_BYTES <= room
    tokens = prompt(MODEL, 5)
    assert server.complete(tokens) == servers.stock_answer(MODEL, tokens, 24)


def test_auto_leaves_room_for_a_draft(alone, prompt) -> None:
    """Target and MTP draft together stay within the budget, although the target chooses before there is a draft."""
    without = alone("qwen4exp", 0, *MTP, **TRANSACTION)
    without.complete(prompt("qwen4exp", 1), n=1)
    compute = compute_bytes(without, "decode")
    budget = compute // MIB + 8
    server = alone("qwen4exp", "auto", *MTP, BUDGET_MIB=budget)
    target, draft = experts(server), experts(server, 1)
    assert 4 < target["slots_per_layer"] < N_EXPERT
    assert target["slot_bytes"] + draft["slot_bytes"] + compute <= budget * MIB


def test_auto_without_a_budget(alone) -> None:
    assert experts(alone(MODEL, "auto"))["slots_per_layer"] == N_EXPERT


def test_auto_that_finds_no_room(alone) -> None:
    message = refusal(alone, "auto", BUDGET_MIB=3)
    assert "4 slots do not fit" in message and "at most 1 fit and at least 4 are needed" in message


def test_repacked_experts(alone, servers: ExpertFleet, prompt) -> None:
    """Without --no-repack stock rearranges Q4_0: every layer is named in log and figures, answers are stock's."""
    server = alone(MODEL, 8, raw=False, **TRANSACTION)
    assert [layer["layer"] for layer in experts(server)["stock_layers"]] == list(range(N_LAYER))
    assert all("--no-repack" in layer["reason"] for layer in experts(server)["stock_layers"])
    assert (experts(server)["slots_per_layer"], experts(server)["layers"]) == (0, [])
    for il in range(N_LAYER):
        assert f"layer {il} keeps the stock path" in server.log_text()
    for n, ubatch in ((5, DECODE_UBATCH), (700, PREFILL_UBATCH), (6, DECODE_UBATCH)):
        tokens = prompt(MODEL, n)
        assert server.complete(tokens) == servers.stock(MODEL, ubatch=ubatch).complete(tokens)
    assert server.counters()["left"] == 1
    assert "no slots" not in server.log_text()


@pytest.mark.parametrize("ring", [2, 3])
def test_some_layers_repacked(alone, servers: ExpertFleet, prompt, ring: int) -> None:
    """The other layers have slots and ring, although layers on the stock path lie between them."""
    server = alone("mixed", 8, raw=False, RING=ring, **TRANSACTION)
    figures = experts(server)
    stock_layers = [layer["layer"] for layer in figures["stock_layers"]]
    assert 0 in stock_layers and len(stock_layers) < N_LAYER
    assert sorted(stock_layers + [layer["layer"] for layer in figures["layers"]]) == list(range(N_LAYER))
    for n, ubatch in ((5, DECODE_UBATCH), (700, PREFILL_UBATCH), (6, DECODE_UBATCH)):
        tokens = prompt(MODEL, n)
        assert server.complete(tokens) == servers.stock("mixed", ubatch=ubatch).complete(tokens)
    assert experts(server)["slots"]["looked_up"] > 0 and experts(server)["ring"]["layers_streamed"] > 0


def test_a_model_without_experts(alone, servers: ExpertFleet, prompt) -> None:
    """A model without experts has no figures, and answers."""
    server = alone("gemma", 8, **TRANSACTION)
    assert "experts" not in server.phase()
    tokens = prompt("gemma", 5)
    assert server.complete(tokens, n=4) == servers.stock_answer("gemma", tokens, 4)


def test_figures_add_up(alone, prompt) -> None:
    server = alone(MODEL, 7, **TRANSACTION)
    n_decoded = 0
    for n in (1, 30, 600, 1):
        server.complete(prompt(MODEL, n), n=20)
        n_decoded += 20 - 1 + (n == 1)
    figures = experts(server)
    assert figures["slot_bytes"] == 7 * N_LAYER * EXPERT_BYTES
    assert figures["pinned_bytes"] == N_LAYER * LAYER_BYTES
    for layer in figures["layers"]:
        assert layer["runs"] >= n_decoded
        assert layer["looked_up"] == layer["runs"] * N_USED, "one token a time, with EXPERT_BATCH=1"
        assert layer["hit"] + layer["missed"] == layer["looked_up"]
        assert layer["copied_bytes"] == layer["missed"] * EXPERT_BYTES
        assert layer["evicted"] <= layer["missed"]
    for name in ("looked_up", "hit", "missed", "evicted", "runs", "copied_bytes"):
        assert figures["slots"][name] == sum(layer[name] for layer in figures["layers"])
    assert figures["ring"]["copied_bytes"] == figures["ring"]["layers_streamed"] * LAYER_BYTES > 0

    samples = dict(line.rsplit(" ", 1) for line in server.metrics_text().splitlines() if not line.startswith("#"))
    for sample, value in {
        "expert_lookups_total": figures["slots"]["looked_up"],
        "expert_misses_total": figures["slots"]["missed"],
        "expert_evictions_total": figures["slots"]["evicted"],
        "expert_copied_bytes_total": figures["slots"]["copied_bytes"],
        "streamed_bytes_total": figures["ring"]["copied_bytes"],
        "slots": 7 * N_LAYER,
        "slot_bytes": figures["slot_bytes"],
        "pinned_bytes": figures["pinned_bytes"],
    }.items():
        assert float(samples[f"llama_phase_{sample}"]) == pytest.approx(value, rel=1e-9), sample
    for layer in figures["layers"]:
        label = f'{{context="0",layer="{layer["layer"]}"}}'
        assert float(samples[f"llama_phase_layer_expert_lookups_total{label}"]) == layer["looked_up"]
        assert float(samples[f"llama_phase_layer_expert_misses_total{label}"]) == layer["missed"]


def test_a_draft_does_not_touch_the_slots_of_its_target(alone, prompt) -> None:
    """A draft that runs but whose tokens are never good enough: the target's counters are those without a draft."""
    model = "flat"
    tokens = prompt(model, 5)
    plain = alone(model, N_EXPERT, EXPERT_BATCH=4)
    drafting = alone(model, N_EXPERT, *MTP, "--spec-draft-p-min", "1.0", EXPERT_BATCH=4)
    figures = []
    for server in (plain, drafting):
        first = server.complete(tokens, n=40)  # its experts stay: no miss depends on what ran at the start
        before = experts(server)["layers"]
        answer = server.complete(tokens, n=40)
        assert answer == first and answer.timings.get("draft_n", 0) == 0
        # not the last layer: with a draft it computes every token of the prompt, not only the one that is sampled from
        pairs = list(zip(before, experts(server)["layers"], strict=True))[:-1]
        figures.append([{k: new[k] - old[k] for k in ("looked_up", "missed", "evicted", "runs")} for old, new in pairs])
    assert figures[0] == figures[1]
    assert figures[0][0]["missed"] == 0 and figures[0][0]["runs"] >= 40
    draft = experts(drafting, 1)
    # a step a round; what it catches up on needs no experts
    assert 70 <= draft["slots"]["runs"] <= 80 and draft["slots"]["missed"] > 0, "the draft ran, from slots of its own"
    assert draft["slots_per_layer"] == experts(drafting)["slots_per_layer"] == N_EXPERT


def figures_in_prefill(server: EngineServer, tokens: list[int]) -> dict:
    """The target's figures in the middle of a long prompt; it is cancelled."""
    with server.stream(tokens):
        state = wait_until(lambda: (s := server.phase())["phase"] == "prefill" and s, "in the prefill phase")
    wait_until(lambda: server.phase()["phase"] == "decode", "cancelled")
    return state["experts"][0]


@pytest.mark.parametrize(("asked", "n_regions"), [(0, 0), (1, 0), (2, 2), (3, 3), (8, 8), (64, 8)])
def test_ring_as_asked_for(alone, prompt, asked: int, n_regions: int) -> None:
    """At most one region for each layer; a single one would overlap nothing."""
    server = alone(MODEL, 8, RING=asked, sizes={"ctx": 8192}, **TRANSACTION)
    figures = figures_in_prefill(server, prompt(MODEL, 7000))
    assert (figures["ring_regions"], figures["slots_per_layer"]) == (n_regions, 0)
    assert n_regions * LAYER_BYTES <= figures["ring_bytes"] <= n_regions * LAYER_BYTES * 1.1
    assert (experts(server)["ring_regions"], experts(server)["slots_per_layer"]) == (0, 8)


@pytest.mark.parametrize("n_regions", [3, 2, 0])
def test_ring_that_the_budget_leaves(alone, servers: ExpertFleet, prompt, n_regions: int) -> None:
    """Fewer regions, then none, when the prefill buffers do not fit beside more: logged once, kept for the rest and
    said in the figures; the answers are right."""
    without = alone(MODEL, 0, **TRANSACTION)
    without.complete(prompt(MODEL, 600), n=1)
    budget = (compute_bytes(without, "prefill") + n_regions * LAYER_BYTES) // MIB + 1  # a region is 1.7 MiB
    server = alone(MODEL, 8, BUDGET_MIB=budget, RING=3, **TRANSACTION)
    tokens = prompt(MODEL, 1100)
    assert server.complete(tokens) == servers.stock_answer(MODEL, tokens, 24, ubatch=PREFILL_UBATCH)
    tried = re.findall(r"do not fit beside a ring of (\d) layers", server.log_text())
    assert tried == [str(n) for n in (3, 2) if n > n_regions]
    assert bool(experts(server)["ring"]["layers_streamed"]) == bool(n_regions)
    assert (server.counters()["entered"], server.counters()["rolled_back"]) == (1, 0)
    assert experts(server)["slots_per_layer"] == 8

    assert server.complete(tokens, n=1).tokens == servers.stock_answer(MODEL, tokens, 1, ubatch=PREFILL_UBATCH).tokens
    assert re.findall(r"do not fit beside a ring of (\d) layers", server.log_text()) == tried
    note = experts(server).get("note", "")
    assert note.startswith(f"ring of {n_regions} layers: the prefill buffers do not fit") if tried else note == ""


def test_budget_too_small_for_the_prefill_buffers(alone, servers: ExpertFleet, prompt) -> None:
    """Rolled back: the small micro-batch, the slots again, the shortfall in the message."""
    server = alone(MODEL, 8, BUDGET_MIB=8, **TRANSACTION)
    tokens = prompt(MODEL, 600)
    assert server.complete(tokens) == servers.stock_answer(MODEL, tokens, 24)
    state = server.phase()
    assert (state["counters"]["rolled_back"], state["counters"]["entered"]) == (1, 0)
    assert re.search(r"exceed the budget of 8 MiB by \d+ MiB", state["last_failure"])
    assert (experts(server)["slots_per_layer"], experts(server)["ring_bytes"]) == (8, 0)
    assert servers.stock(MODEL, *RAW).complete(tokens) != servers.stock_answer(MODEL, tokens, 24), "the split shows"


def test_draft_counts_against_the_budget(alone, prompt) -> None:
    """A budget is a device's, not a context's: slots that fit beside the target's buffers alone are refused."""
    model = "qwen4exp"
    without = alone(model, 0, *MTP, **TRANSACTION)
    without.complete(prompt(model, 1), n=1)
    both = compute_bytes(without, "decode")
    target = alone(model, 0, **TRANSACTION)
    target.complete(prompt(model, 1), n=1)
    budget = (compute_bytes(target, "decode") + 16 * N_LAYER * EXPERT_BYTES) // MIB + 1
    assert budget * MIB < both + 16 * (N_LAYER + 1) * EXPERT_BYTES, "the draft's would not fit"
    message = refusal_of(alone, model, 16, *MTP, BUDGET_MIB=budget, **TRANSACTION)
    assert "16 slots do not fit" in message
    roomy = (both + 16 * (N_LAYER + 1) * EXPERT_BYTES) // MIB + 1
    server = alone(model, 16, *MTP, BUDGET_MIB=roomy, **TRANSACTION)
    assert experts(server)["slots_per_layer"] == 16 <= experts(server, 1)["slots_per_layer"]


def test_ring_shares_the_budget_with_a_draft(alone, servers: ExpertFleet, prompt) -> None:
    """The target's ring shrinks when the draft's prefill buffers take what is left; the answer is stock's."""
    model = "qwen4exp"
    without = alone(model, 0, *MTP, **TRANSACTION)
    without.complete(prompt(model, 600), n=1)
    tokens = prompt(model, 1100)
    room = compute_bytes(without, "prefill")  # of both
    for regions in (3, 2):
        server = alone(model, 8, *MTP, BUDGET_MIB=(room + regions * LAYER_BYTES) // MIB + 1, RING=3, **TRANSACTION)
        assert server.complete(tokens) == servers.stock_answer(model, tokens, 24, *MTP, ubatch=PREFILL_UBATCH)
        assert (server.counters()["entered"], server.counters()["rolled_back"]) == (1, 0)
        note = experts(server).get("note", "")
        assert note.startswith("ring of 2 layers") if regions == 2 else note == ""
