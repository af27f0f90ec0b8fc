#!/usr/bin/env python3
"""llama-cpp-python on the engine of llama-phase: examples/llama_cpp_python.py MODEL."""

import argparse
import os
import sys
from pathlib import Path

import llama_phase
from llama_phase.errors import LlamaPhaseError, MissingPrerequisite
from llama_phase.gguf_header import check_model


def answer(model: Path) -> None:
    check_model(model)  # says what is wrong with a file; llama-cpp-python only that it failed
    os.environ["LLAMA_CPP_LIB_PATH"] = str(llama_phase.library_path())  # before llama_cpp is imported
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise MissingPrerequisite(
            f"there is no llama-cpp-python: {error}",
            fix="CMAKE_ARGS=-DLLAMA_BUILD=OFF .venv/bin/pip install llama-cpp-python==0.3.36",
        ) from None

    # The engine reads its variables when the context is created. n_batch, the logical batch, holds a large micro-batch.
    with llama_phase.environment(prefill_mode="transaction", prefill_ubatch=512):
        # all layers on the GPU, where there is one: an MoE model has to fit, since no switch keeps experts out
        llm = Llama(str(model), n_gpu_layers=-1, n_ctx=4096, n_batch=512, n_ubatch=128, verbose=False)

    with llama_phase.attach(llm) as controls, controls.events() as events:
        text = llm("Once upon a time there was a very long prompt. " * 60, max_tokens=16, temperature=0.0)
        print(text["choices"][0]["text"])
        print(*(f"{event.kind} in {event.ms:.1f} ms" for event in events), sep="\n")
        print(controls.stats())
    llm.close()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="GGUF file", type=Path)
given = parser.parse_args()
try:
    answer(given.model)
except LlamaPhaseError as error:
    print(f"error: {error}\nfix: {error.fix}", file=sys.stderr)
    sys.exit(error.exit_code)
