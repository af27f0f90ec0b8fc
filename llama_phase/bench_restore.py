"""What the slots hold behind a long prompt, and when it is copied: first token, begin of the answer, longest pause.

Times are the server's, with each piece of a streamed answer (`timings_per_token`). The refill in front of the first
token (LLAMA_PHASE_REFILL_MIB=0) is there for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from llama_phase.bench import (
    HOST_EXPERTS,
    Configuration,
    Workload,
    median,
    phase_slots,
    prompt_tokens,
)
from llama_phase.client import Client
from llama_phase.hardware import device_memory_mib
from llama_phase.server import Server
from llama_phase.settings import Settings

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cold", {"restore": "cold"}),
    ("snapshot", {"restore": "snapshot"}),
    ("prompt", {"restore": "prompt"}),
    ("prompt at once", {"restore": "prompt", "refill_mib": 0}),
    ("snapshot at once", {"restore": "snapshot", "refill_mib": 0}),
)
FIRST = 64  # tokens
SHOWN = 16  # of the first gaps between tokens
MIB = 2**20


def restore_suite(threads: int, slots: str) -> list[Configuration]:
    """Every policy for each number of `slots`, comma-separated."""
    flags = (*HOST_EXPERTS, "-np", "1", "-t", str(threads), "--no-warmup")
    return [
        Configuration(f"{n} slots, {name}", {**phase_slots(n), "prefill_ubatch": 4096, **policy}, flags)
        for n in map(int, slots.split(","))
        for name, policy in POLICIES
    ]


def speed_of(pieces: Sequence[tuple[int, float]], n: int) -> float | None:
    """Tokens per second of the first `n` tokens behind the first one; None for a shorter answer. `pieces`: (tokens so
    far, milliseconds since the first token), one entry a piece; a piece can hold several tokens."""
    last = max((piece for piece in pieces if piece[0] <= n), default=None)
    if last is None or last[0] < n - 4 or last[0] < 2 or last[1] <= 0:
        return None
    return 1000 * (last[0] - 1) / last[1]


def gaps_of(pieces: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Milliseconds between a token and the one before it, where both came one by one, by its number from 1."""
    return {after[0]: after[1] - before[1] for before, after in pairwise(pieces) if after[0] == before[0] + 1}


def _sums(phase: dict[str, Any]) -> dict[str, int]:
    ways = ("slots", "prefetch", "refill")
    return {way: sum(one.get(way, {}).get("copied_bytes", 0) for one in phase.get("experts", [])) for way in ways}


def _ask(client: Client, text: int, prompt: list[int], n_predict: int) -> dict[str, Any]:
    before = _sums(client.phase() or {})
    pieces: list[tuple[int, float]] = []
    tokens: list[int] = []
    timings: dict[str, float] = {}
    for chunk in client.stream(prompt, n_predict, cache_prompt=False, ignore_eos=True, timings_per_token=True):
        tokens += chunk.tokens
        timings = chunk.timings or timings
        if chunk.tokens and chunk.timings:
            pieces.append((int(chunk.timings["predicted_n"]), chunk.timings["predicted_ms"]))
    state = client.phase() or {}
    after = _sums(state)
    gaps = gaps_of(pieces)
    return {
        "kind": "prefill",
        "text": text,
        "tokens": tokens,
        "prompt_ms": timings["prompt_ms"],
        "prompt_per_second": timings["prompt_per_second"],
        "first_per_second": speed_of(pieces, FIRST),
        "predicted_per_second": speed_of(pieces, n_predict),
        "gap_ms": max(gaps.values(), default=None),
        "first_gaps_ms": [gaps.get(number) for number in range(2, SHOWN + 2)],
        "leave_ms": state.get("last_leave_ms"),
        "batches": [one.get("refill", {}).get("batches") for one in state.get("experts", [])],
        **{f"{way}_bytes": after[way] - before[way] for way in after},
    }


def measure_restore(configuration: Configuration, model: Path, workload: Workload, vocabulary: int) -> dict[str, Any]:
    """Start the server, ask one long prompt after the other, stop it. The first two warm up: graphs are captured, slots
    are full. Raises what Server raises."""
    settings = Settings.load(model=model, port=0, upstream=configuration.upstream, **configuration.settings)
    with Server(settings) as server, server.client() as client:
        samples = []
        for text in range(-1, workload.runs + 1):
            prompt = prompt_tokens(workload.long_tokens, text, vocabulary)
            samples.append(_ask(client, text, prompt, workload.answer_tokens))
        return {
            "samples": [sample for sample in samples if sample["text"] > 0],
            "memory_mib": device_memory_mib(server.pid),
            "phase": client.phase(),
            "build_info": client.props().get("build_info"),
        }


def restore_table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians over all texts, but for the longest pause of any. `filled`: MiB copied into empty slots behind a prompt,
    in front of so many `steps`; `missed`, `ahead`: MiB that the answer's tokens waited for, and prefetched. Below: the
    milliseconds from token to token at the begin of an answer."""
    shown = Table(title="behind a long prompt")
    shown.add_column("configuration")
    columns = ("prefill tok/s", "TTFT ms", f"first {FIRST} tok/s", "all tok/s", "pause ms", "longest", "leave ms")
    for column in (*columns, "filled MiB", "steps", "missed", "ahead", "MiB", "same text"):
        shown.add_column(column, justify="right")
    reference = _texts(next(iter(results.values())))
    begins: list[str] = []
    for name, rounds in results.items():
        samples = [sample for one in rounds for sample in one["samples"]]
        texts = _texts(rounds)
        gaps = [sample["gap_ms"] for sample in samples if sample["gap_ms"] is not None]
        steps = zip(*(sample["first_gaps_ms"] for sample in samples), strict=True)
        begins.append(f"{name}: " + " ".join(_median(step, 1) or "-" for step in steps))
        shown.add_row(
            name,
            _median((s["prompt_per_second"] for s in samples), 0),
            _median((s["prompt_ms"] for s in samples), 1),
            _median((s["first_per_second"] for s in samples), 1),
            _median((s["predicted_per_second"] for s in samples), 1),
            _median(gaps, 1),
            f"{max(gaps):.1f}" if gaps else "",
            _median((s["leave_ms"] for s in samples), 1),
            _median((s["refill_bytes"] / MIB for s in samples), 0),
            _median((s["batches"][0] for s in samples if s["batches"]), 0),
            _median((s["slots_bytes"] / MIB for s in samples), 0),
            _median((s["prefetch_bytes"] / MIB for s in samples), 0),
            _median((one["memory_mib"] for one in rounds), 0),
            f"{sum(texts[key] == reference.get(key) for key in texts)}/{len(texts)}",
        )
    shown.caption = "\n".join(begins)
    return shown


def _texts(rounds: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    return {sample["text"]: sample["tokens"] for one in rounds for sample in one["samples"]}


def _median(values: Iterable[float | None], digits: int) -> str:
    value = median(values)
    return "" if value is None else f"{value:.{digits}f}"
