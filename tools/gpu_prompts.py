"""Part `prompts` of gpu_engine.py: prompts whose experts are streamed through a ring of exactly two regions.

Each row's answers are compared with stock code, all weights on the GPU, at the same batch split: tokens and the
log-probabilities of the likeliest eight, bit for bit. No token of these models is certain, so a value that is wrong
anywhere shows. Two prompts of one request begin in the same step of the server: their batches are stock's, too.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from scored import Likeliest, first_other, likeliest
from served import PHASE, complaints, logged, prompt_of, served, together
from synth_gguf import make_model

from llama_phase.client import Client

UBATCH, BATCH = 512, 1024  # two micro-batches a batch: two prompts share some
SLOTS = {"expert_slots": 16, "expert_batch": 4}  # the 4 tokens that a server cuts off a prompt's end come from slots
RING_OF_TWO = {**PHASE, **SLOTS, "batch": BATCH, "prefill_ubatch": UBATCH, "ring": 2}
REFERENCE = {"prefill_mode": "off", "ubatch": UBATCH, "batch": BATCH}
FLAGS = ("-np", "2", "--no-repack", "--cache-ram", "0")
NO_CUTS = ("--ctx-checkpoints", "0")  # else stock computes the last 4 tokens' host experts on the CPU
FLAT = {"bigram": 0.0, "mtp": "no"}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen4exp": ("tiny", FLAT, NO_CUTS),
    "qwen35moe": ("tiny-35", FLAT, ()),
    "mixed types": ("tiny-moe", {**FLAT, "expert_type": "Q8_0,Q4_K,Q4_0,F16,F32"}, NO_CUTS),
}
PLACES = {
    "GPU layers between": ("-ot", r"blk\.[25]\.ffn_.*_exps=CUDA0", "--cpu-moe"),
    "GPU layers behind": ("--n-cpu-moe", "5"),
}
PASSES = {1: 400, 2: 900, 3: 1400, 4: 2000}  # micro-batches -> tokens of a prompt
AT_ONCE = (900, 1100)
LONG_TOKENS = 14000  # 14 batches: in one of them it is cancelled
CANCEL_TRIES = 5
ANSWER_TOKENS = 48
LAST_ON_GPU = ("-ot", r"blk\.7\.ffn_.*_exps=CUDA0", "--cpu-moe")  # of eight layers


def ask(client: Client, n_tokens: int, n_predict: int = ANSWER_TOKENS, **more: Any) -> list[Likeliest]:
    more = {"cache_prompt": False, **more}
    got = client.completion(prompt_of(n_tokens), n_predict, n_probs=8, ignore_eos=True, **more)
    return likeliest(got.probabilities)


def ask_at_once(client: Client) -> list[list[Likeliest]]:
    prompts = [prompt_of(n_tokens) for n_tokens in AT_ONCE]
    replies = together(client, prompts, ANSWER_TOKENS, cache_prompt=False, n_probs=8, ignore_eos=True)
    return [likeliest(reply["completion_probabilities"]) for reply in replies]


def figures(client: Client) -> dict[str, int]:
    phase = client.phase() or {}
    experts = phase["experts"][0]
    free = sum(device.get("free_bytes", 0) for device in phase["memory"]["decode"])
    own = {"host_layers": len(experts["layers"]), "streamed": experts["ring"]["layers_streamed"], "free_bytes": free}
    return {**phase["counters"], **own}


def row(model: str, what: str, wrong: list[str], detail: str = "") -> list[str]:
    """Prints it; what is wrong, as failures."""
    print(f"{model:12} {what:36} {'WRONG ' + wrong[0] if wrong else 'equal':40} {detail}", flush=True)
    return [f"{model}, {what}: {text}" for text in wrong]


def check_prompts(name: str, models: Path, split: tuple[str, ...] = ()) -> list[str]:
    preset, overrides, cuts = MODELS[name]
    model = make_model(preset, models / f"prompts-{preset}.gguf", **overrides)
    flags = (*FLAGS, *cuts, *split)
    long = {"ctx": 2 * (LONG_TOKENS + 512)}
    with served(model, REFERENCE | long, flags) as client:
        expected = {n_tokens: ask(client, n_tokens) for n_tokens in PASSES.values()}
        both = ask_at_once(client)
        whole = ask(client, LONG_TOKENS, id_slot=0)
    failures = []
    with logged(model, RING_OF_TWO | long, ("--cpu-moe", *flags)) as (client, log):
        loaded_bytes = log.stat().st_size
        failures += check_streamed(name, "ring 2", client, expected, both)
        of_ring = {n_tokens: ask(client, n_tokens, 1)[0] for n_tokens in PASSES.values()}
        failures += check_cancelled(name, client, whole, one_device=not split)
        said = complaints(log.read_bytes()[loaded_bytes:].decode(errors="replace"))
        failures += row(name, "its log", said)
    if cuts:
        failures += check_offload(name, model, REFERENCE | long, flags, of_ring)
    for what, placement in PLACES.items() if name == "mixed types" else ():
        with served(model, RING_OF_TWO, (*placement, *flags)) as client:
            failures += check_streamed(name, what, client, expected, both)
    return failures


def check_streamed(
    name: str, what: str, client: Client, expected: dict[int, list[Likeliest]], both: list[list[Likeliest]]
) -> list[str]:
    """Prompts of one to four micro-batches, each of which streams the host layers once; two at once, twice."""
    failures = []
    for passes, n_tokens in PASSES.items():
        before = figures(client)
        wrong = [text for text in [first_other(expected[n_tokens], ask(client, n_tokens))] if text]
        after = figures(client)
        # rounded up: where no token is sampled from, a last layer may have nothing to do
        n_streamed = -(-(after["streamed"] - before["streamed"]) // after["host_layers"])
        wrong += [f"{n_streamed} passes"] if n_streamed != passes else []
        wrong += [f"{before} became {after}"] if after["left"] - before["left"] != 1 else []
        failures += row(name, f"{what}, {passes} micro-batches", wrong, f"host layers {after['host_layers']}")
    for turn in (1, 2):
        before = figures(client)
        got = ask_at_once(client)
        others = (first_other(a, b) for a, b in zip(both, got, strict=True))
        wrong = [f"prompt {n_tokens}: {text}" for n_tokens, text in zip(AT_ONCE, others, strict=True) if text]
        after = figures(client)
        entered, left, prompts = (after[what] - before[what] for what in ("entered", "left", "prompts"))
        if (entered, left, prompts) != (1, 1, 2):
            wrong.append(f"{prompts} prompts entered {entered} times and left {left} times")
        failures += row(name, f"{what}, two prompts at once, turn {turn}", wrong)
    return failures


def check_cancelled(name: str, client: Client, expected: list[Likeliest], one_device: bool) -> list[str]:
    """A request that goes away while its prompt is streamed, then the same again: from the beginning, and from where
    the first one was. What the first cancel takes for good (kernels that are loaded) later ones do not take again."""
    wrong = [first_other(expected, ask(client, LONG_TOKENS, id_slot=0))]
    failures = row(name, "not cancelled", [text for text in wrong if text])
    free = [figures(client)["free_bytes"]]
    for cached in (False, True, False, False):
        wrong = []
        phase = next(filter(None, (cancelled(client) for _ in range(CANCEL_TRIES))), None)
        if phase is None:
            return failures + row(name, "cancelled", [f"it had ended in {CANCEL_TRIES} tries"])
        regions = phase["experts"][0]["ring_regions"]
        if one_device and (regions != 2 or phase["phase"] != "prefill"):
            wrong.append(f"phase {phase['phase']} with {regions} regions")
        got = client.completion(
            prompt_of(LONG_TOKENS), ANSWER_TOKENS, cache_prompt=cached, n_probs=8, ignore_eos=True, id_slot=0
        )
        wrong += [text for text in [first_other(expected, likeliest(got.probabilities))] if text]
        if bool(got.timings["cache_n"]) != cached:
            wrong.append(f"{got.timings['cache_n']} tokens from the cache")
        free.append(figures(client)["free_bytes"])
        after = client.phase() or {}
        held = {what: after["experts"][0][what] for what in ("slots_per_layer", "ring_bytes")}
        if after["phase"] != "decode" or held != {"slots_per_layer": SLOTS["expert_slots"], "ring_bytes": 0}:
            wrong.append(f"{after['phase']}: {held}")
        if after["counters"]["entered"] != after["counters"]["left"] or after["counters"]["rolled_back"]:
            wrong.append(f"counters {after['counters']}")
        of_it = f"cached {got.timings['cache_n']}, aborted {after['counters']['aborted']}"
        failures += row(name, f"cancelled, again{' from there' if cached else ''}", wrong, of_it)
    # behind the same requests: the first turn and the last two
    grew = [f"free bytes {free}"] if len({free[1], free[3], free[4]}) != 1 else []
    return failures + row(name, "device memory behind a cancel", grew, f"free {free}")


def cancelled(client: Client) -> dict[str, Any] | None:
    """/phase in the middle of the long prompt, whose connection was closed then; None when that was too late."""
    before = figures(client)["aborted"]
    asked = {"cache_prompt": False, "id_slot": 0, "return_progress": True}
    with closing(client.stream(prompt_of(LONG_TOKENS), ANSWER_TOKENS, **asked)) as pieces:
        for piece in pieces:
            if not piece.progress or piece.progress.processed:
                break
        phase = client.phase()
    while client.slots()[0]["is_processing"]:
        time.sleep(0.01)
    return phase if figures(client)["aborted"] == before + 1 else None


def check_offload(
    name: str, model: Path, settings: dict[str, Any], flags: tuple[str, ...], of_ring: dict[int, Likeliest]
) -> list[str]:
    """Stock with the experts in host memory copies them for each operator of a micro-batch, and gives the ring's first
    token behind each prompt. Its last layer's experts are on the GPU: that layer computes the last token alone, which
    stock leaves to the CPU, where activations near the middle between two steps are rounded otherwise."""
    failures = []
    with served(model, settings, (*LAST_ON_GPU, *flags)) as client:
        for passes, n_tokens in PASSES.items():
            different = first_other([of_ring[n_tokens]], ask(client, n_tokens, 1))
            failures += row(name, f"stock's own copies, {passes} micro-batches", [different] if different else [])
    return failures
