#!/usr/bin/env python3
"""llama-cpp-python on the engine of llama-phase: examples/llama_cpp_python.py MODEL."""

import os
import sys

import llama_phase

os.environ["LLAMA_CPP_LIB_PATH"] = str(llama_phase.library_path())  # before llama_cpp is imported
from llama_cpp import Llama

# The engine reads its variables when the context is created. n_batch, the logical batch, holds a large micro-batch.
with llama_phase.environment(prefill_mode="transaction", prefill_ubatch=512):
    llm = Llama(sys.argv[1], n_ctx=4096, n_batch=512, n_ubatch=128, verbose=False)

with llama_phase.attach(llm) as controls, controls.events() as events:
    answer = llm("Once upon a time there was a very long prompt. " * 60, max_tokens=16, temperature=0.0)
    print(answer["choices"][0]["text"])
    print(*(f"{event.kind} in {event.ms:.1f} ms" for event in events), sep="\n")
    print(controls.stats())
llm.close()
