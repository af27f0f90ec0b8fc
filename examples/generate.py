#!/usr/bin/env python3
"""Answer a long prompt in this process and show what the phases did: examples/generate.py MODEL [PROMPT_FILE]."""

import argparse
import sys

from llama_phase import Engine
from llama_phase.errors import LlamaPhaseError

PROMPT = "Once upon a time there was a very long prompt. " * 60


def answer(model: str, prompt: str) -> None:
    # all on the GPU, where there is one, but the experts of an MoE model: they stay in host memory
    placed = {"gpu_layers": -1, "cpu_experts": True}
    with (
        Engine(model, ctx=4096, ubatch=128, prefill_ubatch=512, **placed) as engine,
        engine.controls.events() as events,
    ):
        for chunk in engine.stream(prompt, n_predict=32, progress=True):
            if chunk.progress:
                print(f"prompt: {chunk.progress.processed} of {chunk.progress.total} tokens", file=sys.stderr)
            print(chunk.text, end="", flush=True)
        print()
        for event in events:
            print(f"{event.kind}: micro-batch {event.ubatch} from now on, took {event.ms:.1f} ms", file=sys.stderr)
        read, written = chunk.timings["prompt_per_second"], chunk.timings["predicted_per_second"]
        print(f"{read:.0f} tokens/s read, {written:.0f} written", file=sys.stderr)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="GGUF file")
parser.add_argument("prompt", nargs="?", help="text file", type=argparse.FileType(encoding="utf-8"))
given = parser.parse_args()
try:
    answer(given.model, given.prompt.read() if given.prompt else PROMPT)
except LlamaPhaseError as error:
    print(f"error: {error}\nfix: {error.fix}", file=sys.stderr)
    sys.exit(error.exit_code)
