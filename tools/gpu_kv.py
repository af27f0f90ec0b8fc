#!/usr/bin/env python3
"""K/V in host memory on a GPU: the answers of K/V in VRAM, then what it costs. Needs a GPU and build/cuda.

usage: gpu_kv.py [--models DIR] [--big FILE] [--parts equal,rows,speed,more,all,stock,vram] [--depths N,...]
                 [--rounds N] [--gpus 2]

Compared are tokens, the log-probabilities of the likeliest ten at each, tokens taken from the cache, and drafts made
and accepted: bit for bit, at the same batch split. (For verified drafts the server gives no log-probabilities: each
conversation ends with answers of a single token, which need none.) With --gpus 2 layers are split evenly over two
devices in both places, and each device has K/V of its layers on the host.

equal  tiny models through llama-server, K/V on the host against K/V on the device; 1 and 4 streams, with and without
       MTP, with and without a switch of the phase, with experts in host memory and slots in both; and a dense model by
       force, whose context is shifted in one stream and in four at once
rows   the same with several sizes of what the device keeps of host K/V (LLAMA_PHASE_KV_ROWS), in 1 and 4 streams, with
       and without MTP: a conversation that grows, forks behind a checkpoint and in front of it, and is saved, put aside
       and restored; four prompts at once; a prompt of 40000 tokens, alone and beside shorter ones. Verify batches of 7
       as well, which the scores of pools have a kernel for. The counters say that rows were found

The other parts are rows of `llama_phase.bench --suite kv`, with the big model (made when it is missing, 13 GB):

speed  conversations, stock, and both places of K/V alike
more   the same on the host with nothing kept on the device, and with the stock selection
all    the same on the host with all positions kept on the device as well
stock  a conversation with -nkvo, which is given up after a minute
vram   device memory at two context sizes, both places and three micro-batches: bytes per token of context

exit codes: 0 measured and all equal, 1 a difference or a program that failed, named on its line
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scored import scored
from served import PHASE, prompt_of, split_over, together
from synth_gguf import make_model

from llama_phase import bench
from llama_phase.bench import prompt_tokens
from llama_phase.errors import LlamaPhaseError
from llama_phase.server import Server
from llama_phase.settings import Settings
from llama_phase.slot_client import SlotClient

ROWS_OF_PARTS = {  # --only of the suite
    "speed": ("=stock", "=device", "=device, fast", "=host, fast"),
    "more": ("=host, none kept", "=host, stock"),
    "all": ("=host, all kept",),
    "stock": ("=stock, -nkvo",),
    "vram": ("VRAM",),
}
ALL_ON_GPU = ("-ngl", "99", "--no-warmup", "-t", "4", "-fa", "on")
OFF = {"prefill_mode": "off", "ubatch": 256, "batch": 1024}
# shapes that upstream's sparse kernel takes; those of the indexer's own kernel, with as many rows as a real model's
SPARSE_KERNEL = {"heads": 16, "heads_kv": 2, "head_dim": 256, "rope_dim": 64}
INDEXER_KERNEL = {"idx_dim": 128, "idx_topk": 2048}
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
MTP_ONE = (*MTP[:-1], "1")  # verify batches of 2, which the sparse kernel takes from 8204 rows on
MTP_SIX = (*MTP[:-1], "6")
SLOTS = {"expert_slots": 16, "expert_batch": 4}
ONE_SLOT, FOUR_STREAMS = ("-np", "1"), ("-np", "4", "-no-kvu")
N_PROBS = 10
CTX, CTX_SHIFTED = 10240, 1024  # of a stream
PROMPTS = (1, 9, 300, 1000, 5000, 9000)  # tokens; the sparse kernel begins at 4096 rows
ANSWER_TOKENS = 64
CHECKPOINT_FORK, FULL_FORK = 4900, 4500  # of 5000 tokens: the server's checkpoint is 260 in front of their end
LONG_PROMPT, LONG_CTX = 40000, 45056
AT_ONCE = (4400, 5100, 5800, 6500)
LONG_AT_ONCE = (LONG_PROMPT, 5000, 1000, 20)
SHIFTED_AT_ONCE, SHIFTED_ANSWER = (800, 700, 900, 1000), 400

Answer = tuple[list[list[tuple[int, float]]], list[int | None]]


def answer_of(reply: dict[str, Any]) -> Answer:
    """What has to be the same: for each token itself, then the likeliest ones, with log-probabilities; the tokens from
    the cache, drafted and accepted."""
    tokens = [scored((step, *step["top_logprobs"])) for step in reply["completion_probabilities"]]
    return tokens, [reply["timings"].get(name) for name in ("cache_n", "draft_n", "draft_n_accepted")]


def first_difference(expected: dict[str, Answer], got: dict[str, Answer]) -> str:
    """Step, token and values of the first one; empty when all is the same."""
    for step in {**expected, **got}:
        (tokens, counts), (other_tokens, other_counts) = (answers.get(step, ([], [])) for answers in (expected, got))
        for number, pairs in enumerate(zip_longest(tokens, other_tokens, fillvalue=())):
            for a, b in zip_longest(*pairs):
                if a != b:
                    return f"{step}, token {number}: {a} and {b}"
        if counts != other_counts:
            return f"{step}: cached, drafted, accepted {counts} and {other_counts}"
    return ""


class Asker:
    """Asks one server, and keeps each answer under what was asked."""

    def __init__(self, client: SlotClient, streams: int):
        self.client = client
        self.streams = streams
        self.answers: dict[str, Answer] = {}

    def ask(self, step: str, prompt: list[int], n: int = 24, slot: int = 0, **extra: Any) -> list[int]:
        """Prompt and answer."""
        got = self.client.completion(prompt, n, id_slot=slot, n_probs=N_PROBS, ignore_eos=True, **extra)
        self.answers[step] = answer_of(got.raw)
        return prompt + got.tokens

    def ask_singly(self, step: str, prompt: list[int], n: int = 8) -> None:
        """Answers of one token, each of which the next one's prompt ends with: batches of one, never a draft."""
        for number in range(n):
            prompt = self.ask(f"{step} {number}", prompt, 1)

    def ask_at_once(self, lengths: Sequence[int], n: int) -> None:
        """One request with a prompt for each stream, whose answers share their batches."""
        prompts = [prompt_tokens(length, 31 + number, 4000) for number, length in enumerate(lengths)]
        replies = together(self.client, prompts, n, n_probs=N_PROBS, ignore_eos=True, cache_prompt=False)
        for length, reply in zip(lengths, replies, strict=True):
            self.answers[f"at once {length}"] = answer_of(reply)


Scenario = Callable[[Asker], None]


def prompts_twice(asker: Asker) -> None:
    for number in (1, 2):
        for length in PROMPTS:
            asker.ask(f"prompt {length}, {number}", prompt_of(length), ANSWER_TOKENS, slot=-1, cache_prompt=False)


def conversation(asker: Asker) -> None:
    """What a slot goes through."""
    first = asker.ask("begin", prompt_tokens(5000, 1, 4000), 150)
    first = asker.ask("30 more", [*first, *prompt_tokens(30, 2, 4000)])
    first = asker.ask("300 more", [*first, *prompt_tokens(300, 3, 4000)])
    asker.ask("fork behind a checkpoint", [*first[:CHECKPOINT_FORK], *prompt_tokens(100, 7, 4000)])
    fork = asker.ask("fork in front of it", [*first[:FULL_FORK], *prompt_tokens(40, 4, 4000)])
    asker.client.save(0, "fork.bin")
    asker.ask("another", prompt_tokens(9000, 5, 4000), 64)
    asker.client.restore(0, "fork.bin")
    fork = asker.ask("restored", [*fork, *prompt_tokens(9, 6, 4000)])
    for slot in range(1, asker.streams):
        asker.ask(f"slot {slot}", prompt_tokens(4400 + slot, 6 + slot, 4000), slot=slot)
    fork = asker.ask("1 more", [*fork, *prompt_tokens(1, 20, 4000)])
    asker.ask_singly("single", fork)


def long_prompt(asker: Asker) -> None:
    """An answer behind it, and the next turn."""
    prompt = asker.ask("long", prompt_tokens(LONG_PROMPT, 1, 4000), 150)
    prompt = asker.ask("behind long", [*prompt, *prompt_tokens(30, 2, 4000)], 150)
    asker.ask_singly("single behind long", prompt)


def at_once(asker: Asker) -> None:
    asker.ask_at_once(AT_ONCE, 64)


def long_at_once(asker: Asker) -> None:
    asker.ask_at_once(LONG_AT_ONCE, 64)


def shifted(asker: Asker) -> None:
    """Answers that run over the end of the context."""
    asker.ask("alone", prompt_tokens(800, 1, 4000), SHIFTED_ANSWER)
    asker.ask_at_once(SHIFTED_AT_ONCE, SHIFTED_ANSWER)


def run(
    model: Path, settings: dict[str, Any], upstream: tuple[str, ...], scenarios: Sequence[Scenario]
) -> tuple[dict[str, Answer], dict[str, Any]]:
    """The answers of one server, and /phase at the end. Raises what the server raises."""
    streams = 4 if "-no-kvu" in upstream else 1
    with tempfile.TemporaryDirectory() as saved:
        flags = (*ALL_ON_GPU, *upstream, "--slot-save-path", saved)
        ctx = settings["ctx"] * streams
        loaded = Settings.load(model=model, port=0, upstream=flags, **{**settings, "ctx": ctx})
        with Server(loaded) as server, SlotClient(server.url, api_key=server.settings.probe_key) as client:
            asker = Asker(client, streams)
            for scenario in scenarios:
                scenario(asker)
            return asker.answers, client.phase() or {}


def check_answers(answers: dict[str, Answer], upstream: tuple[str, ...]) -> list[str]:
    """What makes a comparison one: all candidates are there, a checkpoint was restored, drafts were made."""
    failures = []
    drafts = "draft-mtp" in upstream
    for step, (tokens, (cached, drafted, _)) in answers.items():
        if not tokens or any(len(pairs) != 1 + N_PROBS for pairs in (tokens[:1] if drafts else tokens)):
            failures.append(f"{step}: candidates are missing")
        if bool(drafted) != drafts and len(tokens) > 1:
            failures.append(f"{step}: {drafted} drafted")
        if step == "fork behind a checkpoint" and not FULL_FORK < (cached or 0) < CHECKPOINT_FORK:
            failures.append(f"{step}: {cached} from the cache")
    return failures


def check_case(
    name: str,
    model: Path,
    settings: dict[str, Any],
    upstream: tuple[str, ...],
    scenarios: Sequence[Scenario],
    hosts: Sequence[dict[str, Any]],
    gpus: int = 1,
) -> list[str]:
    """Each setting of `hosts` against K/V on the device; what is wrong, and a line for each on the terminal."""
    failures = []
    upstream = (*split_over(gpus), *upstream)
    begin = time.monotonic()
    try:
        expected, _ = run(model, {**settings, "kv": "device", "select": "stock"}, upstream, scenarios)
        failures += check_answers(expected, upstream)
        for host in hosts:
            got, phase = run(model, {**settings, "select": "fast", **host}, upstream, scenarios)
            different = first_difference(expected, got)
            contexts = phase.get("kv", {}).get("contexts", [])
            counts = [layer["rows"] for one in contexts for layer in one["layers"] if layer.get("rows")]
            looked_up, missed = (sum(count[what] for count in counts) for what in ("looked_up", "missed"))
            line = f"{name:20} {host['kv']:8} rows {host.get('kv_rows', 'auto'):5} "
            print(f"{line} {f'DIFFERS {different}' if different else f'equal, {len(got)} answers':20} "
                  f"looked up {looked_up}, missed {missed}, {time.monotonic() - begin:.1f} s", flush=True)  # fmt: skip
            begin = time.monotonic()
            failures += [different] if different else []
            failures += check_answers(got, upstream)
            if not contexts or not all(one["host_bytes"] for one in contexts):
                failures.append(f"no K/V in host memory: {contexts}")
            devices = {layer["device"] for one in contexts for layer in one["layers"] if layer["place"] == "host"}
            if gpus > 1 and len(devices) != gpus:
                failures.append(f"K/V on the host of {sorted(devices)}, not of {gpus} devices")
            # batches too wide for the kernel that reads kept rows do not count
            if host.get("kv_rows", "0") != "0" and upstream[-1] != "6" and not 0 < missed < looked_up:
                failures.append(f"rows {host['kv_rows']}: looked up {looked_up}, missed {missed}")
            if "expert_slots" in settings and not all(one["slots"]["looked_up"] for one in phase["experts"]):
                failures.append(f"slots were not used: {phase['experts']}")
    except LlamaPhaseError as error:
        failures.append(str(error))
    return [f"{name}: {failure}" for failure in failures]


def check_equal(models: Path, gpus: int) -> list[str]:
    tiny = make_model("tiny", models / "kv-tiny.gguf", **SPARSE_KERNEL)
    dense = make_model("tiny-moe", models / "kv-tiny-moe.gguf")
    host, forced = [{"kv": "host"}], [{"kv": "host-all"}]
    failures = []
    for name, model, settings, upstream, places in (
        ("decode phase only", tiny, OFF, ONE_SLOT, host),
        ("phases", tiny, PHASE, ONE_SLOT, host),
        ("phases, MTP", tiny, PHASE, (*ONE_SLOT, *MTP), host),
        ("slots", tiny, {**PHASE, **SLOTS}, (*ONE_SLOT, "--cpu-moe"), host),
        ("slots, MTP", tiny, {**PHASE, **SLOTS}, (*ONE_SLOT, "--cpu-moe", *MTP), host),
        ("4 streams", tiny, OFF, FOUR_STREAMS, host),
        ("4 slots, 1 stream", tiny, OFF, ("-np", "4", "-kvu"), host),
        ("dense", dense, PHASE, ONE_SLOT, forced),
    ):
        failures += check_case(name, model, {**settings, "ctx": CTX}, upstream, [prompts_twice], places, gpus)
    shift = (*FOUR_STREAMS, "--context-shift")
    failures += check_case("dense, shifted", dense, {**OFF, "ctx": CTX_SHIFTED}, shift, [shifted], forced, gpus)
    return failures


def check_rows(models: Path, gpus: int) -> list[str]:
    """Rows: as many as positions (each has its own), fewer (the oldest go), too few for a verify batch."""
    model = make_model("tiny", models / "kv-tiny-2048.gguf", **SPARSE_KERNEL, **INDEXER_KERNEL)
    one, four = (conversation, long_prompt), (conversation, at_once, long_at_once)
    failures = []
    for name, upstream, scenarios, sizes in (
        ("one slot", ONE_SLOT, one, ("auto", str(LONG_CTX), "4200", "0")),
        ("MTP", (*ONE_SLOT, *MTP_ONE), one, ("auto", "4200", "4000")),
        ("MTP 6", (*ONE_SLOT, *MTP_SIX), (conversation,), ("auto",)),
        ("4 streams", FOUR_STREAMS, four, ("auto",)),
        ("4 streams, MTP", (*FOUR_STREAMS, *MTP_ONE), four, ("auto",)),
    ):
        ctx = CTX if scenarios == (conversation,) else LONG_CTX
        places = [{"kv": "host", "kv_rows": rows} for rows in sizes]
        failures += check_case(name, model, {**OFF, "ctx": ctx}, upstream, scenarios, places, gpus)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llama-phase"))
    parser.add_argument("--big", type=Path, default=Path("/dev/shm/llama-phase/fns.gguf"))
    parser.add_argument("--parts", default="equal,speed,stock")
    parser.add_argument("--depths", default="2048,8192,32768,131072")
    parser.add_argument("--rounds", default="2")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="parts equal and rows")
    parser.add_argument("--variants", default="", help="rows instead of the parts' own, between semicolons")
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_kv.json")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - {"equal", "rows", *ROWS_OF_PARTS}:
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    options.models.mkdir(parents=True, exist_ok=True)

    failures = check_equal(options.models, options.gpus) if "equal" in parts else []
    failures += check_rows(options.models, options.gpus) if "rows" in parts else []
    rows = [f"={name.strip()}" for name in options.variants.split(";") if name.strip()]
    rows = rows or [row for part in parts for row in ROWS_OF_PARTS.get(part, ())]
    if rows:
        model = options.big if options.big.exists() else make_model("flash-next-small", options.big)
        arguments = [str(model), "--suite", "kv", "--depths", options.depths, "--rounds", options.rounds]
        only = [word for row in rows for word in ("--only", row)]
        if bench.main([*arguments, *only, "--json", str(options.json)]):
            failures.append("the suite, as said above")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
