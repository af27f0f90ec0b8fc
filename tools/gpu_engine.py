#!/usr/bin/env python3
"""Correctness of the CUDA engine, through llama-server, on synthetic models. Needs a GPU and build/cuda.

usage: gpu_engine.py [--models DIR] [--cycles N] [--quick] [--parts answers,prompts,drafts,chunks,cycles]
                     [--presets tiny,...] [--gpus 2]

Compared with all weights on the GPU, stock code, at the same batch split: greedy tokens and the log-probabilities of
every token, bit for bit. Cold and warm slots, the fewest slots, all experts as slots, with and without prefetch, every
restore policy, refills at once and in parts, rings of 2 and 3. Without a ring the last layer's single token of a prompt
is computed on the CPU, as stock does: then tokens are equal and log-probabilities nearly. Prompts between EXPERT_BATCH
and the threshold are left out: they take the stock path, which computes host experts on the CPU. For the same reason
runs with expert memory that is not pinned (injected) are compared at the token behind each prompt only. Verify batches
of MTP drafts are compared with stock's MTP, a router in host memory with stock's. Then: CUDA graphs are replayed, in a
long answer behind a long prompt nearly once a token and over buffers that stay as they are, and after many transactions
the device has as much free memory as before, to the byte. With --gpus 2 layers are split evenly over two devices, the
reference's, too. Chunks divide sums in another way on a GPU, and so do micro-batches of another size in stock: on
all-F32 models the first token may differ by CHUNK_FACTOR times what stock shows between its sizes in the same run. Near
ties among experts and rows enlarge single differences, so three quarters of the prompts count, and no prompt may be
CHUNK_WORST away. Why they differ, tensor by tensor: tools/first_difference.py. What the parts prompts (streamed,
several at once, cancelled, mixed types) and drafts (each length, two slots) compare: gpu_prompts.py, gpu_drafts.py.

exit codes: 0 all equal, 1 a difference, named on its line
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_drafts import MODELS as DRAFTING_MODELS
from gpu_drafts import check_drafts
from gpu_prompts import MODELS as PROMPT_MODELS
from gpu_prompts import check_prompts
from scored import scored
from served import PHASE, PREFILL_UBATCH, STOCK, prompt_of, served, split_over
from synth.adapter import write_adapter
from synth_gguf import make_model

from llama_phase.bench import prompt_tokens
from llama_phase.errors import LlamaPhaseError

PARTS = ("answers", "prompts", "drafts", "chunks", "cycles")
PRESETS = ("tiny", "tiny-moe", "tiny-35")
BETWEEN = "GPU layers between, ring 2"
NO_RING = "slots for the tail, ring 0"
PROMPTS = (1, 300, 1500, 2500)  # tokens; all but the first switch the phase
ANSWER_TOKENS = 96
NO_RING_TOLERANCE = 0.01  # of a log-probability; seen: 0.0001
ADAPTER_TOLERANCE = 0.5  # of a log-probability; without the adapter tokens are others
CHUNK_PROMPTS = tuple(range(300, 2700, 100))  # tokens
CHUNK_FACTOR = 6  # seen: 3.8 (qwen4exp), whose changes first_difference.py explains token by token
CHUNK_FLOOR = 0.002  # of a log-probability: within it stock's own difference does not matter
CHUNK_WORST = 1.5  # of a log-probability; stock's near ties show up to 0.75 among 1500 tokens
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
LONG_ANSWER_TOKENS, LEAST_REPLAYS = 1000, 900
NOT_PINNED = "pin.register:*,pin.copy:*"


def answers(model: Path, settings: dict, upstream: tuple[str, ...], repeats: int = 1) -> tuple[list, dict]:
    """Tokens with log-probabilities for every prompt, `repeats` times over, and /phase at the end."""
    with served(model, settings, upstream) as client:
        out = []
        for _, length in itertools.product(range(repeats), PROMPTS):
            prompt = prompt_of(length)
            got = client.completion(prompt, ANSWER_TOKENS, cache_prompt=False, n_probs=3, ignore_eos=True)
            out.append(scored(got.probabilities))
        return out, client.phase() or {}


def first_difference(expected: list, got: list, tolerance: float = 0) -> str:
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            if x[0] != y[0] or abs(x[1] - y[1]) > tolerance:
                return f"prompt {PROMPTS[number % len(PROMPTS)]}, token {step}: {x} and {y}"
    return ""


def check_model(
    preset: str, model: Path, n_used: int, n_expert: int, quick: bool, split: tuple[str, ...] = ()
) -> list[str]:
    failures = []
    expected, _ = answers(model, STOCK, split)
    variants = [("static, all slots", {**STOCK, "expert_slots": n_expert}, 2)]
    least = {"expert_slots": 2 * n_used, "expert_batch": 2}
    for restore, ring in (("snapshot", "auto"), ("cold", 2), ("prompt", 3)):
        name = f"least slots, {restore}, ring {ring}"
        variants.append((name, {**PHASE, **least, "restore": restore, "ring": ring}, 2))
    # the server cuts off a prompt's last 4 tokens, which would take the stock path, too
    of_tail = {"expert_slots": 4 * n_used, "expert_batch": 4}
    variants.append((NO_RING, {**PHASE, **of_tail, "ring": 0}, 2))
    variants.append((BETWEEN, {**PHASE, **least, "ring": 2}, 2))
    variants.append(("all slots", {**PHASE, "expert_slots": n_expert}, 2))
    for refill in (0, 1):  # MiB in front of a token
        filled = {"expert_slots": n_expert, "restore": "prompt", "refill_mib": refill}
        variants.append((f"all slots, refill {refill}", {**PHASE, **filled}, 2))
    variants.append(("least slots, pinned copies", {**PHASE, **least, "fault": "pin.register:*"}, 2))
    for prefetch in (0, 1, 8):
        variants.append((f"least slots, prefetch {prefetch}", {**PHASE, **least, "prefetch": prefetch}, 2))
    # the switch alone: all weights on the GPU, at the same batch split
    difference = first_difference(expected, answers(model, PHASE, split)[0])
    print(f"{preset:12} switch alone, all on the GPU: {difference or 'equal'}", flush=True)
    failures += [f"{preset}, switch alone: {difference}"] if difference else []
    for name, settings, repeats in variants[: 3 if quick else None]:
        placement = ("-ot", r"blk\.[235]\.ffn_.*_exps=CUDA0") if name == BETWEEN else ()
        got, phase = answers(model, settings, (*placement, "--cpu-moe", *split), repeats)
        difference = first_difference(expected * repeats, got, NO_RING_TOLERANCE if name == NO_RING else 0)
        experts = phase.get("experts", [{}])[0]
        slots = experts.get("slots", {})
        counters = phase.get("counters", {})
        print(
            f"{preset:12} {name:36} {'DIFFERS ' + difference if difference else 'equal':40} "
            f"looked up {slots.get('looked_up')} missed {slots.get('missed')} "
            f"prefetched {experts.get('prefetch', {}).get('copied')} replays {experts.get('graph_replays')} "
            f"entered {counters.get('entered')} left {counters.get('left')} "
            f"enter {phase.get('last_enter_ms', 0):.1f} ms leave {phase.get('last_leave_ms', 0):.1f} ms",
            flush=True,
        )
        if difference:
            failures.append(f"{preset}, {name}: {difference}")
        if not experts.get("graph_replays"):
            failures.append(f"{preset}, {name}: no CUDA graph was replayed")
        if not slots.get("looked_up"):
            failures.append(f"{preset}, {name}: the slots were not used: {phase.get('experts')}")
        if settings.get("prefill_mode") == "transaction" and counters.get("entered") != repeats * (len(PROMPTS) - 1):
            failures.append(f"{preset}, {name}: counters {counters}")
    failures += failures_of(check_staged, preset, model, [answer[:1] for answer in expected], least, split)
    if not quick:
        failures += failures_of(check_long_answer, preset, model, least, split)
        flags = ("-ot", "ffn_gate_inp=CPU", *split)
        failures += failures_of(check_same_flags, preset, "router on the host", model, least, flags)
    for tensors in (("ffn_down_exps", "ffn_gate_exps"), ("attn_output", "ffn_gate_inp")):
        failures += failures_of(check_adapter, preset, model, least, tensors, split)
    if preset != "tiny-moe":  # which has no MTP block
        of_verify = {"expert_slots": 4 * n_used, "expert_batch": 4}
        least_of_draft = {**of_verify, "draft_slots": 4 * n_used}
        for name, slots in (("least slots, MTP", least_of_draft), ("least slots, resident MTP", of_verify)):
            failures += failures_of(check_same_flags, preset, name, model, slots, (*MTP, *split))
    return failures


def check_same_flags(preset: str, name: str, model: Path, slots: dict, flags: tuple[str, ...]) -> list[str]:
    """Stock, all weights on the GPU, against slots and transactions, both with `flags`."""
    expected, _ = answers(model, STOCK, flags)
    got, phase = answers(model, {**PHASE, **slots}, ("--cpu-moe", *flags), 2)
    difference = first_difference(expected * 2, got)
    members = phase.get("experts", [])
    looked_up = [member["slots"]["looked_up"] for member in members]
    print(f"{preset:12} {name:36} {'DIFFERS ' + difference if difference else 'equal':40} looked up {looked_up}",
          flush=True)  # fmt: skip
    failures = [f"{preset}, {name}: {difference}"] if difference else []
    if not looked_up or not all(looked_up) or len(looked_up) != 1 + ("draft-mtp" in flags):
        failures.append(f"{preset}, {name}: slots were not used: {members}")
    if len(members) > 1 and members[1]["ring"]["layers_streamed"]:
        failures.append(f"{preset}, {name}: the draft has a ring")
    return failures


def check_adapter(preset: str, model: Path, slots: dict, tensors: tuple[str, ...], split: tuple[str, ...]) -> list[str]:
    """A LoRA adapter on one layer. One on its experts leaves them to the CPU, whose products differ: then the first
    token of each answer is compared, whose log-probability is nearly equal."""
    path = write_adapter(model.with_suffix(".lora"), model, *(f"blk.3.{name}.weight" for name in tensors))
    flags = ("--lora", str(path), *split)
    on_experts = "ffn_down_exps" in tensors
    got, phase = answers(model, {**PHASE, **slots}, ("--cpu-moe", *flags))
    expected, _ = answers(model, STOCK, flags)
    if on_experts:
        expected, got = ([answer[:1] for answer in both] for both in (expected, got))
    difference = first_difference(expected, got, ADAPTER_TOLERANCE if on_experts else 0)
    left_out = [layer["layer"] for layer in phase["experts"][0]["stock_layers"]]
    print(f"{preset:12} adapter on {tensors[0]:25} {'DIFFERS ' + difference if difference else 'equal':40} "
          f"stock layers {left_out}", flush=True)  # fmt: skip
    failures = [f"{preset}, adapter on {tensors}: {difference}"] if difference else []
    return failures + ([f"{preset}, adapter: stock layers {left_out}"] if left_out != [3] * on_experts else [])


def check_long_answer(preset: str, model: Path, least: dict, split: tuple[str, ...]) -> list[str]:
    """What the way back from the prompt planned lasts: graphs are replayed, no buffer grows, no graph is kept anew."""
    with served(model, {**PHASE, **least}, ("--cpu-moe", *split)) as client:

        def figures() -> tuple[int, list, int]:
            phase = client.phase() or {}
            buffers = [device["compute_buffer_bytes"] for device in phase["memory"]["decode"]]
            return phase["experts"][0]["graph_replays"], buffers, phase["graphs"][0]["made"]

        begun = None
        prompt = prompt_tokens(max(PROMPTS), 7, 4000)
        for n, _ in enumerate(client.stream(prompt, LONG_ANSWER_TOKENS, cache_prompt=False, ignore_eos=True)):
            begun = figures() if n == 10 else begun
        ended = figures()
    if begun is None:
        return [f"{preset}, long answer: it ended at once"]
    replays = ended[0] - begun[0]
    print(f"{preset:12} long answer: {replays} replays for {LONG_ANSWER_TOKENS} tokens, "
          f"buffers {begun[1]} -> {ended[1]}, graphs made {begun[2]} -> {ended[2]}", flush=True)  # fmt: skip
    failures = [f"{preset}, long answer: {replays} replays"] if replays < LEAST_REPLAYS else []
    return failures + ([f"{preset}, long answer: {begun} became {ended}"] if begun[1:] != ended[1:] else [])


def check_staged(preset: str, model: Path, expected: list, least: dict, split: tuple[str, ...]) -> list[str]:
    """No expert memory is pinned, then some of it: the token behind each long prompt, which the ring computes."""
    failures = []
    for ring, fault in ((2, NOT_PINNED), (3, NOT_PINNED), (2, "pin.register:2,pin.register:5,pin.copy:*")):
        settings = {**PHASE, **least, "ring": ring, "fault": fault}
        got, phase = answers(model, settings, ("--cpu-moe", *split), 2)
        long = [i for i in range(len(got)) if PROMPTS[i % len(PROMPTS)] > 1]
        pairs = [(i, expected[i % len(PROMPTS)], got[i][:1]) for i in long]
        wrong = [f"prompt {PROMPTS[i % len(PROMPTS)]}: {a} and {b}" for i, a, b in pairs if a != b]
        experts = phase.get("experts", [{}])[0]
        staged, rings = len(experts.get("staged_layers", [])), experts.get("ring", {})
        print(
            f"{preset:12} staged, ring {ring}, {fault:32} {'DIFFERS ' + wrong[0] if wrong else 'equal':40} "
            f"layers {staged} overlap {rings.get('overlap', 0):.2f}",
            flush=True,
        )
        failures += [f"{preset}, staged, ring {ring}, {fault}: {wrong[0]}"] if wrong else []
        failures += [f"{preset}: no layer was staged: {experts}"] if not staged else []
    return failures


def first_tokens(model: Path, settings: dict, upstream: tuple[str, ...] = ()) -> tuple[list[dict[int, float]], dict]:
    """The likeliest first tokens of an answer with their log-probabilities, by prompt, and /phase at the end."""
    with served(model, settings, upstream) as client:
        out = []
        for length in CHUNK_PROMPTS:
            got = client.completion(prompt_of(length), 1, cache_prompt=False, n_probs=8)
            out.append({top["id"]: top["logprob"] for top in got.probabilities[0]["top_logprobs"]})
        return out, client.phase() or {}


def distances(expected: list[dict[int, float]], got: list[dict[int, float]]) -> list[float]:
    """Ascending differences of the expected first token's log-probability; 9 when it is not among the likeliest."""
    best = [max(tokens, key=lambda token: tokens[token]) for tokens in expected]
    return sorted(abs(a[token] - b.get(token, a[token] + 9)) for token, a, b in zip(best, expected, got, strict=True))


def three_quarters(ascending: list[float]) -> float:
    return ascending[len(ascending) * 3 // 4]


def check_chunks(preset: str, model: Path, n_used: int) -> list[str]:
    """Chunks of a tile, and of no multiple of one, through the ring."""
    expected, _ = first_tokens(model, STOCK)
    usual = CHUNK_FLOOR / CHUNK_FACTOR
    for ubatch in (PREFILL_UBATCH // 2, PREFILL_UBATCH // 4):
        apart = distances(expected, first_tokens(model, STOCK | {"ubatch": ubatch})[0])
        print(f"{preset:12} stock at {ubatch:4}: {text_of(apart)}", flush=True)
        usual = max(usual, three_quarters(apart))
    failures = []
    whole = {**PHASE, "expert_slots": 2 * n_used, "expert_batch": 2}
    apart = distances(expected, first_tokens(model, whole, ("--cpu-moe",))[0])
    print(f"{preset:12} not in chunks: {text_of(apart)}", flush=True)
    if apart[-1] > 0:
        failures.append(f"{preset}, not in chunks: {text_of(apart)}")
    for chunk in (64, 200):
        settings = {**whole, "chunk": chunk}
        got, phase = first_tokens(model, settings, ("--cpu-moe",))
        apart = distances(expected, got)
        steps = {step["step"]: step["bytes"] for step in phase["last_transaction"]["steps"]}
        buffers = -steps["leave.drop_prefill_buffers"]
        print(f"{preset:12} chunks of {chunk}: {text_of(apart)}; prefill buffers {buffers} bytes", flush=True)
        if three_quarters(apart) > CHUNK_FACTOR * usual or apart[-1] > CHUNK_WORST:
            failures.append(f"{preset}, chunks of {chunk}: {text_of(apart)}, in stock {usual:.5f}")
    return failures


def text_of(ascending: list[float]) -> str:
    return f"first token {three_quarters(ascending):.5f} apart in 3 of 4 prompts, at most {ascending[-1]:.5f}"


def check_cycles(model: Path, cycles: int, split: tuple[str, ...] = (), fault: str = "") -> list[str]:
    """Free device memory after each leave, as the device reports it: equal from the second cycle on."""
    settings = {**PHASE, "expert_slots": 16, "expert_batch": 2, "fault": fault}
    free = []
    begin = time.monotonic()
    with served(model, settings, ("--cpu-moe", *split)) as client:
        prompt = prompt_tokens(300, 1, 4000)
        for _ in range(cycles):
            client.completion(prompt, 4, cache_prompt=False)
            phase = client.phase() or {}
            free.append(sum(device.get("free_bytes", 0) for device in phase["memory"]["decode"]))
    seconds = time.monotonic() - begin
    print(f"{cycles} transactions in {seconds:.1f} s: free bytes after the first {free[0]}, last {free[-1]}")
    figures = sorted(set(free[2:]))
    return [] if len(figures) == 1 else [f"free device memory changes over {cycles} transactions: {figures}"]


def failures_of(check: Callable[..., list[str]], *args: Any) -> list[str]:
    """Those of a check; when it ends early, why."""
    try:
        return check(*args)
    except LlamaPhaseError as error:
        return [f"{check.__name__}{args}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llama-phase"))
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS), help="cycles and prompts alone, others side by side")
    parser.add_argument("--presets", default=",".join(PRESETS), help="whose answers are compared")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: layers split evenly over two devices")
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    failures = []
    split = split_over(options.gpus)
    parts, presets = options.parts.split(","), options.presets.split(",")
    if unknown := {*parts, *presets} - {*PARTS, *PRESETS}:
        parser.error(f"no such parts or presets: {', '.join(sorted(unknown))}")
    for preset in presets if "answers" in parts else ():
        model = make_model(preset, options.models / f"{preset}.gguf")
        failures += failures_of(check_model, preset, model, 4, 32, options.quick, split)
    for name in PROMPT_MODELS if "prompts" in parts else ():
        failures += failures_of(check_prompts, name, options.models, split)
    for name in DRAFTING_MODELS if "drafts" in parts else ():
        failures += failures_of(check_drafts, name, options.models, split)
    for preset in (f"{preset}-exact" for preset in PRESETS) if "chunks" in parts else ():
        model = make_model(preset, options.models / f"{preset}.gguf")
        failures += failures_of(check_chunks, preset, model, 4)
    if "cycles" in parts:
        model = make_model("tiny-moe", options.models / "tiny-moe.gguf")
        failures += failures_of(check_cycles, model, options.cycles, split)
        failures += failures_of(check_cycles, model, options.cycles // 4, split, NOT_PINNED)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
