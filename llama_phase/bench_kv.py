"""What K/V in host memory costs: conversations at several depths, all weights on the GPU, and memory by context.

A conversation is a prompt of random tokens and three answers behind it; decode speeds are those of the answers, with
what the device keeps of host K/V as the turns before left it. All rows but the stock ones are contexts of ours without
a switch (mode bypass), since those send a token's inputs together, which is more than the places of K/V differ by.
Of these, rows with the same selection choose, read and add up the same, so their answers have to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from llama_phase.bench import GPU, Configuration, Workload, median, prompt_tokens
from llama_phase.client import RequestFailed
from llama_phase.hardware import device_memory_mib
from llama_phase.server import Server
from llama_phase.settings import Settings

STOCK, NO_OFFLOAD, DEVICE, HOST, VRAM = "stock", "stock, -nkvo", "device, fast", "host, fast", "VRAM"
DEFAULT_ROWS = (f"={STOCK}", "=device", f"={DEVICE}", f"={HOST}", f"={NO_OFFLOAD}", VRAM)
PAIRS = ((HOST, DEVICE), (HOST, STOCK), (HOST, NO_OFFLOAD), (DEVICE, STOCK))
UBATCH = 2048
TURNS, ADDED_TOKENS = 3, 10  # in front of each turn behind the prompt
NO_OFFLOAD_DEPTH, NO_OFFLOAD_TOKENS, NO_OFFLOAD_LIMIT_S = 32768, 32, 60.0  # the CPU reads all of it for each token
SHALLOW = 8192  # that the speed at the greatest depth is compared with
VRAM_CONTEXTS, VRAM_PROMPT, VRAM_UBATCHES = (16384, 131072), 3000, (64, 128, 512)


def depths_of(text: str) -> tuple[int, ...]:
    """`8192,32768` as numbers, ascending. Raises ValueError."""
    depths = tuple(sorted({int(part) for part in text.split(",")}))
    if depths[0] < 1:
        raise ValueError(f"no prompt lengths: {text}")
    return depths


def kv_suite(threads: int, workload: Workload) -> list[Configuration]:
    """Both places of K/V, stock, more or less of it kept on the device, and memory; DEFAULT_ROWS are the usual ones."""
    flags = (*GPU, "-fa", "on", "-np", "1", "-t", str(threads), "--no-warmup")
    ctx = workload.depths[-1] + TURNS * (workload.answer_tokens + ADDED_TOKENS) + 1
    stock = {"prefill_mode": "off", "ubatch": UBATCH, "batch": UBATCH, "ctx": ctx, "kv": "device", "select": "auto"}
    ours = {**stock, "prefill_mode": "bypass", "prefill_ubatch": 2 * UBATCH, "batch": 2 * UBATCH}
    fast = {**ours, "kv": "host", "select": "fast"}
    kept = {"none": 0, "32768": 32768, "65536": 65536, "all": ctx}
    return [
        Configuration(STOCK, stock, flags),
        Configuration("device", {**ours, "select": "stock"}, flags),
        Configuration(DEVICE, {**ours, "select": "fast"}, flags),
        Configuration(HOST, fast, flags),
        *(Configuration(f"host, {name} kept", {**fast, "kv_rows": rows}, flags) for name, rows in kept.items()),
        Configuration("host, stock", {**fast, "select": "stock"}, flags),
        Configuration(NO_OFFLOAD, stock, (*flags, "-nkvo"), once=True),
        *(
            Configuration(
                f"{VRAM} {place}, -ub {ubatch}",
                {"prefill_mode": "transaction", "ubatch": ubatch, "kv": place, "kv_rows": VRAM_CONTEXTS[0]},
                flags,
                once=True,
            )
            for place in ("device", "host")
            for ubatch in VRAM_UBATCHES
        ),
    ]


def measure_kv(configuration: Configuration, model: Path, workload: Workload, vocabulary: int) -> dict[str, Any]:
    """One round of a row. Raises what Server raises."""
    if configuration.name.startswith(VRAM):
        return _memory(configuration, model, vocabulary)
    settings = Settings.load(model=model, port=0, upstream=configuration.upstream, **configuration.settings)
    depths, turns, n_predict, limit_s = workload.depths, TURNS, workload.answer_tokens, None
    if configuration.name == NO_OFFLOAD:
        depths = (max((depth for depth in depths if depth <= NO_OFFLOAD_DEPTH), default=depths[0]),)
        turns, n_predict, limit_s = 1, min(NO_OFFLOAD_TOKENS, n_predict), NO_OFFLOAD_LIMIT_S
    samples: list[dict[str, Any]] = []
    given_up = False
    with Server(settings) as server, server.client() as client:
        build_info = client.props().get("build_info")
        client.completion(prompt_tokens(64, 1, vocabulary), 16, ignore_eos=True)
        begin = time.monotonic()
        for depth in depths:
            prompt = prompt_tokens(depth, depth, vocabulary)
            for turn in range(turns):
                try:
                    answer = client.completion(prompt, n_predict, ignore_eos=True, timeout_s=limit_s)
                except RequestFailed:
                    if limit_s is None or time.monotonic() - begin < limit_s:
                        raise
                    given_up = True
                    break
                speeds = {name: answer.timings[name] for name in ("prompt_per_second", "predicted_per_second")}
                samples.append({"depth": depth, "turn": turn, **speeds, "tokens": answer.tokens})
                prompt = [*prompt, *answer.tokens, *prompt_tokens(ADDED_TOKENS, turn, vocabulary)]
        return {
            "samples": samples,
            "memory_mib": device_memory_mib(server.pid),
            "phase": None if given_up else client.phase(),
            "build_info": build_info,
        }


def _memory(configuration: Configuration, model: Path, vocabulary: int) -> dict[str, Any]:
    """Device memory of a server in its decode phase, behind a long prompt, by size of its context."""
    used: dict[int, float | None] = {}
    phase = None
    for ctx in VRAM_CONTEXTS:
        settings = Settings.load(
            model=model, port=0, ctx=ctx, upstream=configuration.upstream, **configuration.settings
        )
        with Server(settings) as server, server.client() as client:
            client.completion(prompt_tokens(VRAM_PROMPT, 1, vocabulary), 16, ignore_eos=True)
            used[ctx] = device_memory_mib(server.pid)
            phase = client.phase()
    return {"samples": [], "memory_mib": used[VRAM_CONTEXTS[-1]], "memory_by_ctx": used, "phase": phase}


def different_answers(suite: Sequence[Configuration], results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Rows and rounds whose answers are not those of the first row with their selection. Stock is left out: it divides
    prompts into other batches, and so does -nkvo, with which the CPU computes attention."""
    wanted: dict[str, tuple[str, dict[tuple[int, int], list[int]]]] = {}
    different = []
    for one in suite:
        select = {"auto": "stock"}.get(one.settings.get("select", ""), one.settings.get("select", ""))
        for number, measured in enumerate(results.get(one.name, [])):
            texts = _texts([measured])
            if one.name in (STOCK, NO_OFFLOAD) or not texts:
                continue
            first, expected = wanted.setdefault(select, (one.name, texts))
            wrong = [f"{depth} turn {turn}" for (depth, turn), text in texts.items() if text != expected[depth, turn]]
            if wrong:
                different.append(f"{one.name}, round {number + 1}: at {', '.join(wrong)} not the answer of {first}")
    return different


def kv_table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians over all rounds, one row a configuration: tokens per second of prompts and of the answers behind them, by
    depth; device memory, in VRAM rows with the larger context, and what a token of context takes of it."""
    depths = sorted({sample["depth"] for rounds in results.values() for one in rounds for sample in one["samples"]})
    shown = Table(title="tok/s by depth", caption_justify="left")
    shown.add_column("K/V")
    for column in (*(f"{what} {depth}" for what in ("prompt", "decode") for depth in depths), "MiB", "KiB a token"):
        shown.add_column(column, justify="right")
    shown.add_column("same text", justify="right")
    speeds = {name: _speeds(rounds) for name, rounds in results.items()}
    reference = _texts(next(iter(results.values())))
    for name, rounds in results.items():
        texts = _texts(rounds)
        same = sum(text == reference.get(key, [])[: len(text)] for key, text in texts.items())
        shown.add_row(
            name,
            *(_number(speeds[name].get((what, depth))) for what in ("prompt", "decode") for depth in depths),
            _number(median(one["memory_mib"] for one in rounds), 0),
            _number(median(_kib_a_token(one.get("memory_by_ctx", {})) for one in rounds), 2),
            f"{same}/{len(texts)}" if texts else "",
        )
    shown.caption = "\n".join(_ratios(speeds))
    return shown


def _speeds(rounds: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Medians by (prompt or decode, depth), in this order."""
    samples = [sample for one in rounds for sample in one["samples"]]
    depths = sorted({sample["depth"] for sample in samples})
    prompts = {
        depth: median(s["prompt_per_second"] for s in samples if (s["depth"], s["turn"]) == (depth, 0))
        for depth in depths
    }
    decode = {depth: median(s["predicted_per_second"] for s in samples if s["depth"] == depth) for depth in depths}
    both = {"prompt": prompts, "decode": decode}
    return {(what, depth): speed or 0.0 for what, speeds in both.items() for depth, speed in speeds.items()}


def _ratios(speeds: dict[str, dict[tuple[str, int], float]]) -> list[str]:
    """Lines: of rows one over the other, where both were measured; of each, the greatest depth over a small one."""
    lines = []
    for name, other in PAIRS:
        of, over = speeds.get(name, {}), speeds.get(other, {})
        shared = [f"{what} {depth}: {of[what, depth] / over[what, depth]:.3f}"
                  for what, depth in of if over.get((what, depth))]  # fmt: skip
        lines += [f"{name} x {other}: {', '.join(shared)}"] if shared else []
    depths = sorted({depth for one in speeds.values() for _, depth in one})
    small = SHALLOW if SHALLOW in depths else min(depths, default=0)
    if depths and small < depths[-1]:
        first, last = ("decode", small), ("decode", depths[-1])
        rates = [f"{name}: {one[last] / one[first]:.3f}" for name, one in speeds.items() if {first, last} <= set(one)]
        lines += [f"decode at {depths[-1]} x that at {small}: {', '.join(rates)}"]
    return lines


def _kib_a_token(used: dict[int, float | None]) -> float | None:
    small, large = (used.get(ctx) for ctx in VRAM_CONTEXTS)
    return None if small is None or large is None else (large - small) * 1024 / (VRAM_CONTEXTS[1] - VRAM_CONTEXTS[0])


def _texts(rounds: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    return {(sample["depth"], sample["turn"]): sample["tokens"] for one in rounds for sample in one["samples"]}


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
