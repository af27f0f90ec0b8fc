#!/usr/bin/env python3
"""The Python bindings on the CUDA engine, on synthetic models. Needs a GPU, and the bindings built for build/cuda.

usage: gpu_bindings.py [--models DIR] [--cycles N]

Compared with all weights on the GPU at the same batch split: greedy tokens with experts in host memory, the fewest
slots and transactions. Then: Ctrl-C in a prompt and in an answer leaves an engine that answers the same, and engines
that come and go leave as much free device memory as before.

exit codes: 0 all well, 1 a difference, named on its line
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from synth_gguf import make_model

from llama_phase import Engine
from llama_phase.bench import prompt_tokens

UBATCH = 1024
WHOLE = {"gpu_layers": -1, "ctx": 8192, "prefill_mode": "off", "ubatch": UBATCH, "batch": UBATCH}
SLOTS = {
    "gpu_layers": -1,
    "cpu_experts": True,
    "ctx": 8192,
    "expert_slots": 8,
    "expert_batch": 2,
    "ubatch": 128,
    "batch": UBATCH,
    "prefill_ubatch": UBATCH,
    "prefill_min_tokens": 256,
}
REQUEST = {"n_predict": 64, "ignore_eos": True, "cache_prompt": False}


def check_tokens(model: Path) -> list[str]:
    prompts = [prompt_tokens(length, length, 4000) for length in (1, 300, 1500, 2500)]
    with Engine(model, **WHOLE) as engine:
        expected = [engine.generate(prompt, **REQUEST).tokens for prompt in prompts]
    failures = []
    with Engine(model, **SLOTS) as engine:
        for prompt, tokens in zip(prompts, expected, strict=True):
            for _ in range(2):
                if engine.generate(prompt, **REQUEST).tokens != tokens:
                    failures.append(f"{model.stem}: other tokens after a prompt of {len(prompt)}")
        experts, stats = engine.phase().get("experts", [{}])[0], engine.stats()
        print(f"{model.stem:12} slots {experts.get('slots')} entered {stats.n_entered} left {stats.n_left}", flush=True)
        if stats.n_entered != 6 or stats.n_left != 6 or not experts.get("slots", {}).get("looked_up"):
            failures.append(f"{model.stem}: {stats}")
        failures += check_interrupt(model, engine, prompts[2], expected[2])
    return failures


def check_interrupt(model: Path, engine: Engine, prompt: list[int], expected: list[int]) -> list[str]:
    long = prompt_tokens(8000, 5, 4000)
    for name, tokens, n, delay_s in (("a prompt", long, 8, 0.02), ("an answer", prompt, 6000, 1.0)):
        threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            engine.generate(tokens, **REQUEST | {"n_predict": n})
            time.sleep(2)
        except KeyboardInterrupt:
            print(f"{model.stem:12} Ctrl-C in {name}: {time.monotonic() - began - delay_s:.3f} s", flush=True)
        if engine.stats().phase != "decode" or engine.generate(prompt, **REQUEST).tokens != expected:
            return [f"{model.stem}: not the same after Ctrl-C in {name}"]
    return []


def check_cycles(model: Path, cycles: int) -> list[str]:
    free = []
    for _ in range(cycles):
        with Engine(model, **SLOTS) as engine:
            engine.generate([5] * 300, 4)
            free.append(sum(device.get("free_bytes", 0) for device in engine.phase()["memory"]["decode"]))
    print(f"{cycles} engines: free bytes {free[0]} in the first, {free[-1]} in the last", flush=True)
    figures = sorted(set(free[2:]))
    return [] if len(figures) == 1 else [f"free device memory changes over {cycles} engines: {figures}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llama-phase"))
    parser.add_argument("--cycles", type=int, default=50)
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    failures = []
    for preset in ("tiny", "tiny-moe", "tiny-35"):
        failures += check_tokens(make_model(preset, options.models / f"{preset}.gguf"))
    failures += check_cycles(options.models / "tiny-moe.gguf", options.cycles)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
