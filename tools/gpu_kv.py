#!/usr/bin/env python3
"""K/V in host memory on a GPU: the answers of K/V in VRAM, then what it costs. Needs a GPU and build/cuda.

usage: gpu_kv.py [--models DIR] [--big FILE] [--parts equal,rows,speed,more,all,stock,vram] [--depths N,...]
                 [--rounds N]

equal  tiny models through llama-server, K/V on the host against K/V on the device, same batch split: tokens and
       log-probabilities bit for bit; 1 and 4 streams, with and without MTP, with and without a switch of the phase,
       with experts in host memory and slots in both, and a dense model whose context is shifted
rows   the same with several sizes of what the device keeps of host K/V (LLAMA_PHASE_KV_ROWS): a conversation that
       grows, forks and is saved, put aside and restored; MTP, also with verify batches of 7, which the scores of pools
       have a kernel for; 4 streams, in turn and at once; a prompt of 40000 tokens; the counters say that rows were
       found
speed  conversations with the big model (made when it is missing, 13 GB), all weights on the GPU: prompts of several
       lengths, and three turns behind each; K/V on the device with the stock and with the fast selection, on the host
       with the fast one, --rounds times in turn. All but the first are contexts of ours without a switch (mode bypass),
       since those send a token's inputs together, which is more than the places differ by. (llama-bench draws its
       tokens at random, and restores its state between repetitions, which leaves no rows kept.) With the same selection
       answers must be the same
more   the same on the host with nothing kept on the device, and with the stock selection
all    the same on the host with all positions kept on the device as well
stock  llama-bench with -nkvo, 8k and 32k, given up after a minute
vram   device memory at two context sizes, both places and three micro-batches: bytes per token of context

exit codes: 0 measured and all equal, 1 a difference or a program that failed, named on its line
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scored import scored
from synth_gguf import make_model

from llama_phase.bench import device_memory_mib, prompt_tokens
from llama_phase.server import Server
from llama_phase.settings import Settings
from llama_phase.slot_client import SlotClient

PLACES = ("device", "host")
VARIANTS = {  # name -> LLAMA_PHASE_*
    "device, stock": {},
    "device, fast": {"SELECT": "fast"},
    "host, fast": {"KV": "host", "SELECT": "fast"},
    "host, none kept": {"KV": "host", "SELECT": "fast", "KV_ROWS": "0"},
    "host, 32768 kept": {"KV": "host", "SELECT": "fast", "KV_ROWS": "32768"},
    "host, 65536 kept": {"KV": "host", "SELECT": "fast", "KV_ROWS": "65536"},
    "host, all kept": {"KV": "host", "SELECT": "fast", "KV_ROWS": "1000000"},
    "host, stock": {"KV": "host", "SELECT": "stock"},
}
ALL_ON_GPU = ("-ngl", "99", "--no-warmup", "-t", "4", "-fa", "on")
OFF = {"prefill_mode": "off", "ubatch": 256, "batch": 1024}
PHASE = {"prefill_mode": "transaction", "ubatch": 128, "batch": 1024, "prefill_ubatch": 1024, "prefill_min_tokens": 256}
# shapes that upstream's sparse kernel takes; those of the indexer's own kernel, with as many rows as a real model's
SPARSE_KERNEL = {"heads": 16, "heads_kv": 2, "head_dim": 256, "rope_dim": 64}
INDEXER_KERNEL = {"idx_dim": 128, "idx_topk": 2048}
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
MTP_SIX = (*MTP[:-1], "6")
SLOTS = {"expert_slots": 16, "expert_batch": 4}
LONG_PROMPT = {"tokens": 40000, "ctx": 45056}
MTP_ONE = (*MTP[:-1], "1")  # verify batches of 2, which the sparse kernel takes from 8204 rows on
PROMPTS = (1, 9, 300, 5000, 9000)  # tokens; the sparse kernel begins at 4096 rows
ANSWER_TOKENS = 64
TURNS, TURN_TOKENS = 3, 128
UBATCH = 2048
VRAM_UBATCHES = (64, 128, 512)
BENCH = ("-ngl", "99", "-fa", "1", "-b", str(UBATCH), "-ub", str(UBATCH), "-t", "8", "-o", "json")
STOCK_LIMIT_S = 60.0


def answers(
    model: Path, place: str, settings: dict[str, Any], upstream: tuple[str, ...], streams: int
) -> tuple[list, dict]:
    """Tokens with log-probabilities for every prompt, twice over, and /phase at the end."""
    flags = (*ALL_ON_GPU, *upstream)
    select = "stock" if place == "device" else "fast"
    settings = {**settings, "kv": place, "select": select, "ctx": 10240 * streams}
    loaded = Settings.load(model=model, port=0, upstream=flags, **settings)
    with Server(loaded) as server, server.client() as client:
        out = []
        for length in PROMPTS * 2:
            prompt = prompt_tokens(length, length, 4000)
            got = client.completion(prompt, ANSWER_TOKENS, cache_prompt=False, n_probs=3, ignore_eos=True)
            out.append(scored(got.probabilities))
        return out, client.phase() or {}


def first_difference(expected: list, got: list) -> str:
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return f"prompt {PROMPTS[number % len(PROMPTS)]}, token {step}: {x} and {y}"
    return ""


def check_equal(models: Path) -> list[str]:
    failures = []
    one = ("-np", "1")
    for preset, name, settings, upstream, streams in (
        ("tiny", "decode phase only", OFF, one, 1),
        ("tiny", "phases", PHASE, one, 1),
        ("tiny", "phases, MTP", PHASE, (*one, *MTP), 1),
        ("tiny", "slots", {**PHASE, **SLOTS}, (*one, "--cpu-moe"), 1),
        ("tiny", "slots, MTP", {**PHASE, **SLOTS}, (*one, "--cpu-moe", *MTP), 1),
        ("tiny", "4 streams", OFF, ("-np", "4", "-no-kvu"), 4),
        ("tiny", "4 slots, 1 stream", OFF, ("-np", "4", "-kvu"), 1),
        ("tiny-moe", "dense, forced", PHASE, one, 1),
    ):
        overrides = SPARSE_KERNEL if preset == "tiny" else {}
        model = make_model(preset, models / f"kv-{preset}.gguf", **overrides)
        expected, _ = answers(model, "device", settings, upstream, streams)
        got, phase = answers(model, "host-all" if preset == "tiny-moe" else "host", settings, upstream, streams)
        different = first_difference(expected, got)
        kv = phase["kv"]["contexts"]
        result = f"DIFFERS {different}" if different else "equal"
        print(f"{preset:9} {name:20} {result:30} host bytes {[c['host_bytes'] for c in kv]}", flush=True)
        if different:
            failures.append(f"{preset}, {name}: {different}")
        if not any(c["host_bytes"] for c in kv):
            failures.append(f"{preset}, {name}: no K/V in host memory: {kv}")
        if "expert_slots" in settings and not all(m["slots"]["looked_up"] for m in phase["experts"]):
            failures.append(f"{preset}, {name}: slots were not used: {phase['experts']}")
    return failures


def check_context_shift(models: Path) -> list[str]:
    """The rows of a dense model, forced to the host, are rotated in place."""
    model = make_model("tiny-moe", models / "kv-tiny-moe.gguf")
    out = []
    for place in ("device", "host-all"):
        flags = (*ALL_ON_GPU, "-np", "1", "--context-shift")
        loaded = Settings.load(model=model, port=0, upstream=flags, **{**OFF, "kv": place, "ctx": 1024})
        with Server(loaded) as server, server.client() as client:
            got = client.completion(prompt_tokens(800, 1, 4000), 400, n_probs=3, ignore_eos=True)
            out.append(scored(got.probabilities))
    wrong = f"of {len(out[0])} and {len(out[1])} tokens" if out[0] != out[1] or len(out[0]) != 400 else ""
    print(f"{'tiny-moe':9} {'context shift':20} {f'DIFFERS {wrong}' if wrong else 'equal'}", flush=True)
    return [f"context shift: {wrong}"] if wrong else []


def conversation(
    model: Path, environment: dict[str, Any], upstream: tuple[str, ...], streams: int, saved: Path
) -> tuple[list[list], dict]:
    """What a slot goes through, step by step: tokens with log-probabilities of each, and /phase at the end."""
    flags = (*ALL_ON_GPU, *upstream, "--slot-save-path", str(saved))
    loaded = Settings.load(model=model, port=0, upstream=flags, **{**OFF, "ctx": 10240 * streams, **environment})
    out: list[list] = []
    with Server(loaded) as server, SlotClient(server.settings.base_url, api_key=server.settings.probe_key) as client:

        def ask(prompt: list[int], n: int = 24, slot: int = 0) -> list[int]:
            got = client.completion(prompt, n, id_slot=slot, n_probs=3, ignore_eos=True)
            out.append(scored(got.probabilities))
            return prompt + got.tokens

        first = ask(prompt_tokens(5000, 1, 4000), 150)
        first = ask([*first, *prompt_tokens(30, 2, 4000)])
        first = ask([*first, *prompt_tokens(300, 3, 4000)])
        fork = ask([*first[:4500], *prompt_tokens(40, 4, 4000)])
        client.save(0, "kv-rows.bin")
        ask(prompt_tokens(9000, 5, 4000), 64)
        client.restore(0, "kv-rows.bin")
        fork = ask([*fork, *prompt_tokens(9, 6, 4000)])
        for slot in range(1, streams):
            ask(prompt_tokens(4400 + slot, 6 + slot, 4000), slot=slot)
        ask([*fork, *prompt_tokens(1, 20, 4000)])
        return out, client.phase() or {}


def one_long_prompt(
    model: Path, environment: dict[str, Any], upstream: tuple[str, ...], streams: int, saved: Path
) -> tuple[list[list], dict]:
    """An answer behind it, then the next turn: as conversation()."""
    del streams, saved
    settings = {**OFF, "ctx": LONG_PROMPT["ctx"], **environment}
    loaded = Settings.load(model=model, port=0, upstream=(*ALL_ON_GPU, *upstream), **settings)
    out: list[list] = []
    with Server(loaded) as server, server.client() as client:
        prompt = prompt_tokens(LONG_PROMPT["tokens"], 1, 4000)
        for _ in range(2):
            got = client.completion(prompt, 150, n_probs=3, ignore_eos=True)
            out.append(scored(got.probabilities))
            prompt = [*prompt, *got.tokens, *prompt_tokens(30, 2, 4000)]
        return out, client.phase() or {}


def at_once(
    model: Path, environment: dict[str, Any], upstream: tuple[str, ...], streams: int, saved: Path
) -> tuple[list[list], dict]:
    """One request with a prompt for each stream, whose answers share their batches: as conversation()."""
    del saved
    settings = {**OFF, "ctx": 10240 * streams, **environment}
    loaded = Settings.load(model=model, port=0, upstream=(*ALL_ON_GPU, *upstream), **settings)
    with Server(loaded) as server, server.client() as client:
        prompts = [prompt_tokens(4400 + 700 * stream, 31 + stream, 4000) for stream in range(streams)]
        got = client.completion(prompts, 64, n_probs=3, ignore_eos=True).raw["value"]
        steps = [answer["completion_probabilities"] for answer in sorted(got, key=lambda answer: answer["index"])]
        return [scored(answer) for answer in steps], client.phase() or {}


def check_rows(models: Path) -> list[str]:
    """Rows: as many as positions (each has its own), fewer (the oldest go), too few for a verify batch."""
    failures = []
    model = make_model("tiny", models / "kv-tiny-2048.gguf", **SPARSE_KERNEL, **INDEXER_KERNEL)
    with tempfile.TemporaryDirectory() as saved:
        for name, upstream, streams, sizes, asked in (
            ("one slot", ("-np", "1"), 1, ("auto", "4200"), conversation),
            ("MTP", ("-np", "1", *MTP_ONE), 1, ("4200", "4000"), conversation),
            ("MTP 6", ("-np", "1", *MTP_SIX), 1, ("auto",), conversation),
            ("4 streams", ("-np", "4", "-no-kvu"), 4, ("auto",), conversation),
            ("4 at once", ("-np", "4", "-no-kvu"), 4, ("auto",), at_once),
            ("40000", ("-np", "1"), 1, ("auto", "0"), one_long_prompt),
        ):
            expected, _ = asked(model, {"kv": "device"}, upstream, streams, Path(saved))
            for rows in sizes:
                environment = {"kv": "host", "select": "fast", "kv_rows": rows}
                got, phase = asked(model, environment, upstream, streams, Path(saved))
                wrong = [step for step, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
                counts = [layer["rows"] for c in phase["kv"]["contexts"] for layer in c["layers"] if layer.get("rows")]
                looked_up, missed = (sum(count[what] for count in counts) for what in ("looked_up", "missed"))
                print(f"{name:10} rows {rows:5} {f'DIFFERS in steps {wrong}' if wrong else 'equal':24} "
                      f"looked up {looked_up}, missed {missed}", flush=True)  # fmt: skip
                if wrong:
                    failures.append(f"{name}, rows {rows}: steps {wrong} differ")
                # batches too wide for the kernel that reads kept rows do not count
                if not 0 < missed < looked_up and rows != "0" and name != "MTP 6":
                    failures.append(f"{name}, rows {rows}: looked up {looked_up}, missed {missed}")
    return failures


def bench(program: Path, model: Path, *args: str, limit_s: float) -> list[dict[str, Any]]:
    """Rows of llama-bench, stock; none when it took too long. Raises RuntimeError with the end of its log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    command = [str(program), "-m", str(model), *BENCH, *args]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return []
    if ended.returncode:
        raise RuntimeError(f"llama-bench {' '.join(args)}: exit code {ended.returncode}: {ended.stderr[-600:]}")
    return json.loads(ended.stdout)


def decode_speeds(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    return {f"decode at {row['n_depth']}": round(row["avg_ts"], 1) for row in rows}


def in_conversations(model: Path, variant: str, depths: list[int]) -> tuple[dict[str, float], list[list[int]]]:
    """tok/s as the server reports them, by depth: of the prompt, and of the answers of the turns behind it, the median;
    and the answers' tokens."""
    settings = {name.lower(): value for name, value in VARIANTS[variant].items()}
    shape: dict[str, Any] = {"prefill_mode": "off", "ubatch": UBATCH, "batch": UBATCH}
    if settings:  # a context of ours has a larger micro-batch to switch to
        shape |= {"prefill_mode": "bypass", "prefill_ubatch": 2 * UBATCH, "batch": 2 * UBATCH}
    shape["ctx"] = max(depths) + 2048
    loaded = Settings.load(model=model, port=0, upstream=(*ALL_ON_GPU, "-np", "1"), **shape, **settings)
    speeds: dict[str, float] = {}
    answers = []
    with Server(loaded) as server, server.client() as client:
        client.completion(prompt_tokens(64, 1, 4000), 16, ignore_eos=True)
        for depth in depths:
            prompt = prompt_tokens(depth, depth, 4000)
            decode = []
            for turn in range(TURNS):
                got = client.completion(prompt, TURN_TOKENS, ignore_eos=True)
                decode.append(got.timings["predicted_per_second"])
                if turn == 0:
                    speeds[f"prompt of {depth}"] = round(got.timings["prompt_per_second"], 1)
                answers.append(got.tokens)
                prompt = [*prompt, *got.tokens, *prompt_tokens(10, turn, 4000)]
            speeds[f"decode at {depth}"] = round(statistics.median(decode), 1)
    return speeds, answers


def measure(
    program: Path, model: Path, parts: list[str], depths: list[int], named: list[str], rounds: int
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Speeds by variant, medians of rounds, and failures: with the same choice of rows all answers are the same."""
    variants = ["device, stock", "device, fast", "host, fast"] if "speed" in parts else []
    variants += ["host, none kept", "host, stock"] if "more" in parts else []
    variants += ["host, all kept"] if "all" in parts else []
    measured: dict[str, list[dict[str, float]]] = {}
    failures = []
    expected: dict[str, tuple[str, list[list[int]]]] = {}
    for variant in (named or variants) * rounds:
        begin = time.monotonic()
        speeds, answers = in_conversations(model, variant, depths)
        measured.setdefault(variant, []).append(speeds)
        print(f"{variant:16} {time.monotonic() - begin:5.1f} s {speeds}", flush=True)
        first, wanted = expected.setdefault(VARIANTS[variant].get("SELECT", "stock"), (variant, answers))
        wrong = [number for number, (a, b) in enumerate(zip(wanted, answers, strict=True)) if a != b]
        failures += [f"{variant}: answers {wrong} of {len(answers)} are not those of {first}"] if wrong else []
    results = {
        variant: {what: round(statistics.median(one[what] for one in speeds), 1) for what in speeds[0]}
        for variant, speeds in measured.items()
    }
    if "stock" in parts:
        for depth in ("8192", "32768"):
            args = ("-nkvo", "1", "-p", "0", "-n", "16", "-r", "1", "-d", depth)
            found = decode_speeds(bench(program, model, *args, limit_s=STOCK_LIMIT_S))
            results.setdefault("-nkvo", {}).update(found)
            print(f"{'-nkvo':16} {found or 'given up'}", flush=True)
    return results, failures


def vram_per_token(model: Path, place: str, ubatch: int) -> dict[str, float]:
    """Device memory of a server in its decode phase, behind a long prompt, at 16k and 128k of context."""
    used = []
    sizes = (16384, 131072)
    for ctx in sizes:
        settings = {"prefill_mode": "transaction", "ubatch": ubatch, "ctx": ctx, "kv": place}
        loaded = Settings.load(model=model, port=0, upstream=(*ALL_ON_GPU, "-np", "1"), **settings)
        with Server(loaded) as server, server.client() as client:
            client.completion(prompt_tokens(3000, 1, 4000), 16, ignore_eos=True)
            used.append(device_memory_mib(server.pid) or 0.0)
    return {"MiB at 16k": used[0], "MiB at 128k": used[1],
            "KiB a token": round((used[1] - used[0]) * 1024 / (sizes[1] - sizes[0]), 2)}  # fmt: skip


def show(results: dict[str, dict[str, float]]) -> None:
    columns = sorted({name for row in results.values() for name in row}, key=lambda c: (c[0], int(c.split()[-1])))
    print(f"| {'tok/s':14} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for variant, row in results.items():
        print(f"| {variant:14} | " + " | ".join(f"{row.get(c, float('nan')):>{len(c)}}" for c in columns) + " |")
    first, reference = next(iter(results.items()))
    for variant, row in results.items():
        ratios = [row[c] / reference[c] if c in row and c in reference else float("nan") for c in columns]
        if row is not reference:
            shown = " | ".join(f"{r:>{len(c)}.3f}" for r, c in zip(ratios, columns, strict=True))
            print(f"| {variant:14} | {shown} | x {first}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llama-phase"))
    parser.add_argument("--big", type=Path, default=Path("/dev/shm/llama-phase/fns.gguf"))
    parser.add_argument("--parts", default="equal,speed,stock")
    parser.add_argument("--depths", default="2048,8192,32768,131072")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--variants", default="", help=f"instead of the parts' own, between semicolons: {'; '.join(VARIANTS)}"
    )
    parser.add_argument("--program", type=Path, default=Path("build/cuda/bin/llama-bench"))
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_kv.json")
    options = parser.parse_args()
    parts = options.parts.split(",")
    named = [name.strip() for name in options.variants.split(";") if name.strip()]
    if unknown := set(named) - set(VARIANTS):
        parser.error(f"no such variants: {', '.join(sorted(unknown))}")
    options.models.mkdir(parents=True, exist_ok=True)

    failures = check_equal(options.models) + check_context_shift(options.models) if "equal" in parts else []
    failures += check_rows(options.models) if "rows" in parts else []
    record: dict[str, Any] = {}
    if set(parts) - {"equal", "rows"}:
        if not options.big.exists():
            make_model("flash-next-small", options.big)
        try:
            depths = [int(depth) for depth in options.depths.split(",")]
            record["speed"], different = measure(options.program, options.big, parts, depths, named, options.rounds)
            failures += different
            if "vram" in parts:
                record["vram"] = {
                    f"{place}, -ub {ubatch}": vram_per_token(options.big, place, ubatch)
                    for place in PLACES
                    for ubatch in VRAM_UBATCHES
                }
                print(record["vram"], flush=True)
        except RuntimeError as error:
            failures.append(str(error))
        if record.get("speed"):
            show(record["speed"])
    record["failures"] = failures
    options.json.write_text(json.dumps(record, indent=1))
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
