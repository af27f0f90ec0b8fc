"""Adapters (LoRA) and slots: a layer whose experts one changes keeps the stock path as long as it is in force.

Plain "==" of answers: as stock with the same adapter at the same split, bit for bit, logprobs too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from engine_server import DECODE_UBATCH, MIN_TOKENS, NO_CUTS, PREFILL_UBATCH, EngineServer, assert_same_but_for_ties
from expert_servers import N_LAYER, N_USED, RAW, ExpertFleet, experts
from synth.adapter import write_adapter

pytestmark = pytest.mark.engine

ADAPTED = 3  # the layer; of hybrid models the first one with attention
EXPERTS = tuple(f"blk.{ADAPTED}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
OTHERS = (f"blk.{ADAPTED}.attn_q.weight", f"blk.{ADAPTED}.ffn_gate_inp.weight")
REASON = {"layer": ADAPTED, "reason": "an adapter (LoRA) changes its experts"}
NO_FLASH = ("-fa", "off")
N_SLOTS = 2 * N_USED
N_LONG = PREFILL_UBATCH + 20
N_PASSES = 2
N_STREAMED = N_PASSES * (N_LAYER - 1) + 1  # the last layer computes nothing but the token that is sampled from
MODELS = ["qwen3moe", "qwen4exp"]

Adapter = Callable[..., Path]


@pytest.fixture(scope="module")
def adapter(servers: ExpertFleet, model_path) -> Adapter:
    """`adapter(model, *tensors)`: made once."""

    def path_of(model: str, *tensors: str) -> Path:
        path = servers.logs / f"{model}-{'experts' if tensors == EXPERTS else 'others'}.lora"
        return path if path.exists() else write_adapter(path, model_path(model), *tensors)

    return path_of


def ubatch_of(n: int) -> int:
    return PREFILL_UBATCH if n >= MIN_TOKENS else DECODE_UBATCH


def set_scale(server: EngineServer, scale: float) -> None:
    assert server.http.post("/lora-adapters", json=[{"id": 0, "scale": scale}]).status_code == 200


def looked_up(server: EngineServer) -> list[int]:
    return [layer["looked_up"] for layer in experts(server)["layers"]]


def as_stock_with(servers: ExpertFleet, prompt, model: str, args: tuple[str, ...]) -> EngineServer:
    """A server that answered, in both phases, as stock with the same adapter, and not as stock without."""
    server = servers.switching(model, N_SLOTS, *args, EXPERT_BATCH=2)
    for n in (2, N_LONG, 7):
        tokens = prompt(model, n)
        of_stock = servers.stock_answer(model, tokens, 24, *args, ubatch=ubatch_of(n))
        assert server.complete(tokens, n=24) == of_stock
        assert of_stock.logprobs != servers.stock_answer(model, tokens, 24, *NO_CUTS, ubatch=ubatch_of(n)).logprobs
    return server


@pytest.mark.parametrize("part", [slice(0, 3), slice(0, 1), slice(2, 3)], ids=["all", "gate", "down"])
@pytest.mark.parametrize("model", MODELS)
def test_on_experts(servers: ExpertFleet, tmp_path, model_path, prompt, model: str, part: slice) -> None:
    """The layer reads the model's own tensors in both phases, and nothing is predicted for it; others are served."""
    args = (*NO_CUTS, "--lora", str(write_adapter(tmp_path / "part.lora", model_path(model), *EXPERTS[part])))
    server = as_stock_with(servers, prompt, model, args)
    figures = experts(server)
    assert figures["stock_layers"] == [REASON]
    for layer in figures["layers"]:
        is_served = layer["layer"] != ADAPTED
        assert (layer["runs"] > 0) == is_served
        assert (layer["prefetched"] > 0) == (is_served and layer["layer"] not in (0, ADAPTED + 1))
    assert figures["ring"]["layers_streamed"] == N_STREAMED - N_PASSES


@pytest.mark.parametrize("model", MODELS)
def test_on_other_tensors(servers: ExpertFleet, adapter: Adapter, prompt, model: str) -> None:
    """On attention and router: every layer is served."""
    args = (*NO_CUTS, "--lora", str(adapter(model, *OTHERS)))
    server = as_stock_with(servers, prompt, model, args)
    assert not experts(server)["stock_layers"] and all(looked_up(server))
    assert experts(server)["ring"]["layers_streamed"] == N_STREAMED


@pytest.mark.parametrize("tensors", [EXPERTS, OTHERS], ids=["experts", "others"])
@pytest.mark.parametrize("model", MODELS)
def test_scale_changes(servers: ExpertFleet, adapter: Adapter, prompt, model: str, tensors: tuple[str, ...]) -> None:
    """While the server runs: no graph of another scale is used, kept ones of small batches neither, and a layer's slots
    serve it exactly while no adapter is on it."""
    args = ("--lora", str(adapter(model, *tensors)))
    server = servers.switching(model, N_SLOTS, *args, EXPERT_BATCH=2)
    stocks = {ubatch: servers.stock(model, *RAW, *args, ubatch=ubatch) for ubatch in (DECODE_UBATCH, PREFILL_UBATCH)}
    answers = {}
    # the short ones first: a switch drops the graphs that they keep
    for lengths, scale in product(((2, 1, 2, 1), (MIN_TOKENS, 2)), (1.0, 0.5, 0.0, 1.0)):
        for one in (server, *stocks.values()):
            set_scale(one, scale)
        on_experts = scale > 0 and tensors == EXPERTS
        before = looked_up(server)
        for n in lengths:
            tokens = prompt(model, n)
            answer = server.complete(tokens, n=8)
            assert answer == stocks[ubatch_of(n)].complete(tokens, n=8), (scale, n)
            answers[scale, n] = answer
        assert experts(server)["stock_layers"] == ([REASON] if on_experts else [])
        served = [now > old for now, old in zip(looked_up(server), before, strict=True)]
        assert served == [layer != ADAPTED or not on_experts for layer in range(N_LAYER)]
    assert server.phase()["graphs"][0]["made"] > 1, "graphs were kept, and made anew"
    for n in (2, MIN_TOKENS):
        assert len({str(answers[scale, n].logprobs) for scale in (0.0, 0.5, 1.0)}) == 3


@pytest.mark.parametrize(
    "env",
    [{"RING": 0}, {"CHUNK": 64}, {"RESTORE": "prompt"}, {"FAULT": "pin.register:*,pin.copy:*"}],
    ids=["no-ring", "chunks", "refill", "staged"],
)
def test_other_ways_to_the_experts(servers: ExpertFleet, adapter: Adapter, prompt, env: dict[str, object]) -> None:
    """Prompts without ring, in chunks, through a staging ring; slots that are filled behind a prompt."""
    model = "qwen3moe"
    args = ("--lora", str(adapter(model, *EXPERTS)))
    server = servers.switching(model, N_SLOTS, *args, EXPERT_BATCH=2, **env)
    for n in (N_LONG, 2, 7):
        tokens = prompt(model, n)
        assert server.complete(tokens, n=24) == servers.stock_answer(model, tokens, 24, *args, ubatch=ubatch_of(n))
    assert experts(server)["stock_layers"] == [REASON]


def test_two_requests_with_scales_of_their_own(servers: ExpertFleet, adapter: Adapter, prompt) -> None:
    """Any split but for ties: their batches take turns in the prefill phase, and each sees its scale."""
    model = "qwen3moe-exact"
    args = (*NO_FLASH, "--lora", str(adapter(model, *EXPERTS)))
    server = servers.switching(model, N_SLOTS, *args, EXPERT_BATCH=2, sizes={"parallel": 2})
    requests = [(prompt(model, n, seed=n), [{"id": 0, "scale": scale}]) for n, scale in ((1400, 1.0), (1300, 0.0))]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda request: server.complete(request[0], n=32, lora=request[1]), requests))
    stock = servers.stock(model, *RAW, *args)
    for (tokens, lora), answer in zip(requests, answers, strict=True):
        expected = stock.complete(tokens, n=32, lora=lora)
        assert_same_but_for_ties(answer.tokens, expected)
        assert expected.tokens != stock.complete(tokens, n=32, lora=[{"id": 0, "scale": 1 - lora[0]["scale"]}]).tokens
    counters = server.counters()
    assert counters["entered"] == counters["left"] >= 1 and not counters["rolled_back"]
