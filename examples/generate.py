#!/usr/bin/env python3
"""Answer a long prompt in this process and show what the phases did: examples/generate.py MODEL [PROMPT_FILE]."""

import sys
from pathlib import Path

from llama_phase import Engine

model = sys.argv[1]
prompt = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else "Once upon a time there was a very long prompt. " * 60

with Engine(model, ctx=4096, ubatch=128, prefill_ubatch=512) as engine, engine.controls.events() as events:
    for chunk in engine.stream(prompt, n_predict=32, progress=True):
        if chunk.progress:
            print(f"prompt: {chunk.progress.processed} of {chunk.progress.total} tokens", file=sys.stderr)
        print(chunk.text, end="", flush=True)
    print()
    for event in events:
        print(f"{event.kind}: micro-batch {event.ubatch} from now on, took {event.ms:.1f} ms", file=sys.stderr)
    print(
        f"{chunk.timings['prompt_per_second']:.0f} tokens/s read, {chunk.timings['predicted_per_second']:.0f} written",
        file=sys.stderr,
    )
