"""Side-by-side measurement of server configurations: one model, the same prompts, one run.

    python -m llama_phase.bench MODEL [--suite cpu|gpu|prefetch|restore|prefill|speculation|gpu2|kv]
        [--runs N] [--rounds N] [--only NAME]... [--json FILE]
    make bench-gpu MODEL=FILE      --suite gpu (SUITE=...), on the CUDA engine, into bench-gpu.json

Each round starts the configurations one after the other (so that a drift of the machine hits all of them), and each
asks for the same texts: short prompts with long answers (decode; first random tokens, then prose), and long prompts
with short answers (prefill, time to first token). One warm-up of each kind is not counted. Figures are medians; times
are those the server measures.
Configurations that are not ours are what a user would run otherwise, on the same build without LLAMA_PHASE_*.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llama_phase.client import Client
from llama_phase.errors import LlamaPhaseError
from llama_phase.hardware import device_memory_mib, probe
from llama_phase.prompt_texts import PROMPT_TEXTS
from llama_phase.server import Server
from llama_phase.settings import Settings


@dataclass(frozen=True)
class Configuration:
    """How one server is started. `settings` as for Settings.load, `upstream`: flags of llama-server."""

    name: str
    settings: dict[str, Any]
    upstream: tuple[str, ...] = ()
    once: bool = False  # in the first round only


@dataclass(frozen=True)
class Workload:
    """Prompt lengths and answer lengths in tokens; every run of a kind uses another text. `depths`: of suite kv."""

    short_tokens: int = 200
    answer_tokens: int = 300
    long_tokens: int = 8192
    long_answer_tokens: int = 64
    runs: int = 5
    depths: tuple[int, ...] = ()


@dataclass
class Sample:
    """One request of `kind` decode, prose or prefill; milliseconds and tokens per second as the server reports them."""

    kind: str
    text: int
    prompt_ms: float
    prompt_per_second: float
    predicted_per_second: float
    hit_rate: float | None = None
    copied_bytes: int = 0
    prefetched_bytes: int = 0
    streamed_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_rounds: list[int] = field(default_factory=list)  # by chosen draft length; empty: it was fixed
    enter_ms: float | None = None
    leave_ms: float | None = None
    copy_ms: float = 0.0  # layers were copied into the ring
    exposed_ms: float = 0.0  # of that, nothing was computed
    tokens: list[int] = field(default_factory=list, repr=False)


def prompt_tokens(n: int, text: int, vocabulary: int) -> list[int]:
    """A reproducible prompt of `n` token ids below `vocabulary`; text number `text`."""
    source = random.Random(f"{n} {text}")
    return [source.randrange(100, vocabulary) for _ in range(n)]


def _experts(phase: dict[str, Any]) -> tuple[float, ...]:
    """looked up, missed, bytes copied by lookups, ahead of them, and streamed, milliseconds of streaming and of those
    that were exposed; summed over the contexts"""
    totals: list[float] = [0] * 7
    for experts in phase.get("experts", []):
        slots, ring = experts["slots"], experts["ring"]
        copied = [experts[way]["copied_bytes"] for way in ("slots", "prefetch", "ring")]
        times = (ring.get("copy_ms", 0.0), ring.get("exposed_ms", 0.0))
        for i, value in enumerate((slots["looked_up"], slots["missed"], *copied, *times)):
            totals[i] += value
    return tuple(totals)


def _draft_rounds(before: dict[str, Any], after: dict[str, Any]) -> list[int]:
    """Rounds between the two by draft length, where the server chooses it."""
    old, new = (phase.get("draft", {}).get("rounds", []) for phase in (before, after))
    return [b - a for a, b in zip_longest(old, new, fillvalue=0)]


def _ask(client: Client, kind: str, text: int, prompt: list[int] | str, n_predict: int) -> Sample:
    before = client.phase() or {}
    answer = client.completion(prompt, n_predict, cache_prompt=False, return_tokens=True, ignore_eos=True)
    after = client.phase() or {}
    changes = (b - a for a, b in zip(_experts(before), _experts(after), strict=True))
    looked, missed, copied, prefetched, streamed, copy_ms, exposed_ms = changes
    sample = Sample(
        kind,
        text,
        answer.timings["prompt_ms"],
        answer.timings["prompt_per_second"],
        answer.timings["predicted_per_second"],
        hit_rate=1 - missed / looked if looked else None,
        copied_bytes=copied,
        prefetched_bytes=prefetched,
        streamed_bytes=streamed,
        copy_ms=copy_ms,
        exposed_ms=exposed_ms,
        drafted=int(answer.timings.get("draft_n", 0)),
        accepted=int(answer.timings.get("draft_n_accepted", 0)),
        draft_rounds=_draft_rounds(before, after),
        tokens=answer.tokens,
    )
    if after.get("counters", {}).get("entered", 0) > before.get("counters", {}).get("entered", 0):
        sample.enter_ms = after.get("last_enter_ms")
        sample.leave_ms = after.get("last_leave_ms")
    return sample


def measure(configuration: Configuration, model: Path, workload: Workload, vocabulary: int) -> dict[str, Any]:
    """Start the server, run the workload once, stop it. Raises what Server raises."""
    settings = Settings.load(model=model, port=0, upstream=configuration.upstream, **configuration.settings)
    with Server(settings) as server, server.client() as client:
        samples = []
        for text in range(workload.runs + 1):
            prompt = prompt_tokens(workload.short_tokens, text, vocabulary)
            samples.append(_ask(client, "decode", text, prompt, workload.answer_tokens))
        for text, opening in enumerate(list(PROMPT_TEXTS.values())[: workload.runs + 1]):
            samples.append(_ask(client, "prose", text, opening, workload.answer_tokens))
        for text in range(workload.runs + 1 if workload.long_tokens else 0):
            prompt = prompt_tokens(workload.long_tokens, text, vocabulary)
            samples.append(_ask(client, "prefill", text, prompt, workload.long_answer_tokens))
        result = {
            "memory_mib": device_memory_mib(server.pid),
            "phase": client.phase(),
            "build_info": client.props().get("build_info"),
        }
    return {"samples": [asdict(sample) for sample in samples if sample.text > 0], **result}  # text 0 warms up


GPU = ("-ngl", "99")
HOST_EXPERTS = (*GPU, "--cpu-moe")
PINNED = (*HOST_EXPERTS, "--load-mode", "none")


def phase_slots(n: int) -> dict[str, Any]:
    """Settings for a model with 10 experts per token: as many tokens in a verify batch as that many slots allow."""
    batch = max(1, min(8, n // 10))
    return {
        "prefill_mode": "transaction", "ctx": 16384, "ubatch": 512, "expert_slots": n, "expert_batch": batch
    }  # fmt: skip


def gpu_suite(threads: int) -> list[Configuration]:
    """All on the GPU without and with phases, stock with host experts three ways, the honest rival, and ours with 64,
    128, 256 slots."""
    more = ("-np", "1", "-t", str(threads), "--no-warmup")
    stock = {"prefill_mode": "off", "ctx": 16384}
    return [
        Configuration("all on GPU, -ub 2048", {**stock, "ubatch": 2048}, (*GPU, *more)),
        Configuration("phase, all on GPU", {"prefill_mode": "transaction", "ctx": 16384, "ubatch": 512}, (*GPU, *more)),
        Configuration("stock, mapped file", {**stock, "ubatch": 512}, (*HOST_EXPERTS, *more)),
        Configuration("stock, pinned, -ub 512", {**stock, "ubatch": 512}, (*PINNED, *more)),
        Configuration("stock, pinned, -ub 2048", {**stock, "ubatch": 2048}, (*PINNED, *more)),
        *(Configuration(f"phase, {n} slots", phase_slots(n), (*HOST_EXPERTS, *more)) for n in (64, 128, 256)),
        *(
            Configuration(
                f"phase, 128 slots, prefill {n}", {**phase_slots(128), "prefill_ubatch": n}, (*HOST_EXPERTS, *more)
            )
            for n in (4096, 8192)
        ),
        *(
            Configuration(f"phase, {n} slots, prefetch 0", {**phase_slots(n), "prefetch": 0}, (*HOST_EXPERTS, *more))
            for n in (64, 128, 256)
        ),
        Configuration(
            "phase, 128 slots, prefill 8192, chunked",
            {**phase_slots(128), "prefill_ubatch": 8192, "chunk": "auto"},
            (*HOST_EXPERTS, *more),
        ),
        Configuration("phase, 128 slots, loaded", phase_slots(128), (*PINNED, *more)),
        Configuration(
            "phase, 128 slots, MTP",
            phase_slots(128),
            (*HOST_EXPERTS, *more, "--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
        ),
        Configuration(
            "static -ub 2048, 64 slots",
            {**stock, "ubatch": 2048, "expert_slots": 64, "expert_batch": 6},
            (*HOST_EXPERTS, *more),
        ),
    ]


def prefetch_suite(threads: int) -> list[Configuration]:
    """How many experts are predicted per token."""
    more = (*HOST_EXPERTS, "-np", "1", "-t", str(threads), "--no-warmup")
    return [
        Configuration(f"phase, {slots} slots, prefetch {n}", {**phase_slots(slots), "prefetch": n}, more)
        for slots, n in ((128, 0), (128, 4), (128, 10), (128, 14), (256, 0), (256, 14))
    ]


def cpu_suite(threads: int) -> list[Configuration]:
    """Stock at both micro-batches against the switch, on a machine without GPU."""
    more = ("-np", "1", "-t", str(threads), "--no-warmup", "--no-repack")
    stock = {"prefill_mode": "off", "ctx": 4096}
    phase = {"prefill_mode": "transaction", "ctx": 4096, "prefill_ubatch": 2048, "ubatch": 512}
    return [
        Configuration("stock, -ub 512", {**stock, "ubatch": 512}, more),
        Configuration("stock, -ub 2048", {**stock, "ubatch": 2048}, more),
        Configuration("phase", phase, more),
        Configuration("bypass", {**phase, "prefill_mode": "bypass"}, more),
    ]


CAPTION = (
    "hits: experts found in slots; prefill to GB/s: of long prompts; swap: in and out; overlap: 1 - exposed / copy "
    "time. GB: streamed through the ring for one prompt, to all GPUs together; GB/s: that over the prompt's time "
    "without the switches, waits for computing included, so what the links were used for and not what they can do; "
    "what stock uploads is counted nowhere. then: the answers behind long prompts. same text: greedy answers equal to "
    "those of the first row"
)


def _is_named(configuration: Configuration, name: str) -> bool:
    return configuration.name == name[1:] if name.startswith("=") else name in configuration.name


def median(values: Iterable[float | None]) -> float | None:
    """Median of what is there, None of nothing."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians over all rounds, one row a configuration; the caption says what they mean."""
    shown = Table(title="medians", caption=CAPTION)
    shown.add_column("configuration")
    columns = ("decode tok/s", "hits %", "prose tok/s", "hits %", "prefill tok/s", "TTFT ms", "swap ms", "overlap %")
    for column in (*columns, "GB", "GB/s", "then tok/s", "then hits %", "MiB", "same text"):
        shown.add_column(column, justify="right")
    reference = _texts(next(iter(results.values())))
    for name, rounds in results.items():
        samples = [sample for one in rounds for sample in one["samples"]]
        decode, prose = ([sample for sample in samples if sample["kind"] == kind] for kind in ("decode", "prose"))
        prefill = [sample for sample in samples if sample["kind"] == "prefill"]
        swaps = [(s["enter_ms"] or 0) + (s["leave_ms"] or 0) for s in prefill if s["enter_ms"]]
        texts = _texts(rounds)
        same = sum(texts[key] == reference.get(key) for key in texts)
        shown.add_row(
            name,
            *(
                figure
                for kind in (decode, prose)
                for figure in (
                    _number(median(s["predicted_per_second"] for s in kind)),
                    _number(median(100 * s["hit_rate"] for s in kind if s["hit_rate"] is not None)),
                )
            ),
            _number(median(s["prompt_per_second"] for s in prefill), 0),
            _number(median(s["prompt_ms"] for s in prefill), 0),
            _number(median(swaps), 0),
            _number(median(100 * (1 - s["exposed_ms"] / s["copy_ms"]) for s in prefill if s.get("copy_ms")), 0),
            _number(median(s["streamed_bytes"] / 1e9 for s in prefill if s["streamed_bytes"])),
            _number(median(upload_gb_per_s(s) for s in prefill)),
            _number(median(s["predicted_per_second"] for s in prefill)),
            _number(median(100 * s["hit_rate"] for s in prefill if s["hit_rate"] is not None)),
            _number(median(one["memory_mib"] for one in rounds), 0),
            f"{same}/{len(texts)}",
        )
    return shown


def upload_gb_per_s(sample: dict[str, Any]) -> float | None:
    """Bytes that a prompt streamed to all GPUs over the time of its prefill phase; None when it streamed nothing."""
    phase_ms = sample["prompt_ms"] - (sample["enter_ms"] or 0) - (sample["leave_ms"] or 0)
    return sample["streamed_bytes"] / phase_ms / 1e6 if sample["streamed_bytes"] and phase_ms > 0 else None


def _texts(rounds: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    return {(s["kind"], s["text"]): s["tokens"] for one in rounds for s in one["samples"]}


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"machine": platform.machine(), "processor": _processor(), **asdict(probe())}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(arguments: Sequence[str] | None = None) -> int:
    from llama_phase import bench_kv
    from llama_phase.bench_prefill import gpu2_suite, prefill_suite

    parser = argparse.ArgumentParser(prog="python -m llama_phase.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    suites = {
        "cpu": cpu_suite,
        "gpu": gpu_suite,
        "prefetch": prefetch_suite,
        "prefill": prefill_suite,
        "gpu2": gpu2_suite,
    }
    parser.add_argument("--suite", choices=(*suites, "restore", "speculation", "kv"), default="cpu")
    parser.add_argument("--runs", type=int, default=5, help="counted texts of each kind per round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--long-tokens", type=int, default=8192, help="0: no long prompts")
    parser.add_argument("--answer-tokens", type=int, help="[default: 300; restore: 200; kv: 128]")
    depths = "2048,8192,32768,131072"
    parser.add_argument("--depths", type=bench_kv.depths_of, default=depths, help="kv: prompt lengths, comma-separated")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--only", action="append", metavar="NAME", help="part of a name, or =NAME; may be repeated")
    parser.add_argument("--slots", default="128", help="speculation, restore (several): experts per layer on the GPU")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9", help="speculation: rates, comma-separated")
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args(arguments)

    measure_one, check = measure, lambda suite, results: []
    answer_tokens = options.answer_tokens or {"restore": 200, "kv": 128}.get(options.suite, 300)
    workload = Workload(runs=options.runs, long_tokens=options.long_tokens, answer_tokens=answer_tokens)
    if options.suite == "restore":
        from llama_phase.bench_restore import measure_restore, restore_suite, restore_table

        suite, show, measure_one = restore_suite(options.threads, options.slots), restore_table, measure_restore
    elif options.suite == "speculation":
        from llama_phase.bench_speculation import rates_of, speculation_suite, speculation_table

        suite = speculation_suite(options.threads, options.slots, rates_of(options.acceptance))
        workload, show = replace(workload, long_tokens=0), speculation_table
    elif options.suite == "kv":
        workload = replace(workload, depths=options.depths)
        suite, show = bench_kv.kv_suite(options.threads, workload), bench_kv.kv_table
        measure_one, check = bench_kv.measure_kv, bench_kv.different_answers
        options.only = options.only or bench_kv.DEFAULT_ROWS
    else:
        suite, show = suites[options.suite](options.threads), table
    suite = [one for one in suite if not options.only or any(_is_named(one, name) for name in options.only)]
    console = Console(width=170 if not sys.stdout.isatty() else None)

    results: dict[str, list[dict[str, Any]]] = {one.name: [] for one in suite}
    failed: list[str] = []
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "model": options.model.name,
        "workload": asdict(workload),
        "configurations": [asdict(one) for one in suite],
    }
    for number in range(options.rounds):
        for one in (one for one in suite if not (one.once and number)):
            console.print(f"round {number + 1}: {one.name}")
            try:
                results[one.name].append(measure_one(one, options.model, workload, options.vocabulary))
            except LlamaPhaseError as error:
                failed.append(one.name)
                console.print(f"failed: {error}", markup=False)
            if options.json:
                record["results"] = results
                options.json.write_text(json.dumps(record))
    there = {name: rounds for name, rounds in results.items() if rounds}
    if there:
        console.print(show(there))
    for line in check(suite, there):
        failed.append(line)
        console.print(f"failed: {line}", markup=False)
    if options.json:
        console.print(f"all figures: {options.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
