#!/usr/bin/env python3
"""Compute buffers by micro-batch, context and chunk, planned without allocating; --top: what is alive at their peak.

  tools/compute_buffers.py [--model FILE | --preset NAME] [--ubatch N,..] [--ctx N,..] [--chunk 0,auto] [--top 8]

No weights are read: a preset of tools/synth_gguf.py takes no disk. The graph is the CPU engine's: all nodes in one
buffer, as on one GPU.

exit codes: 0 done, 3 the CPU engine or a compiler is missing, 2 wrong usage or a model that does not load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from synth.checked_spec import make_spec
from synth.gguf_file import llama_cpp_dir, use_gguf_py
from synth_gguf import plan_tensors

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ROOT / "build/cpu/bin"
PROGRAM = ROOT / "build/compute_buffers"


def build() -> None:
    """Compiles the C++ part against the built engine when it is older than either."""
    source = ROOT / "tools/compute_buffers.cpp"
    library = LIBRARIES / "libllama.so"
    newest = max(source.stat().st_mtime, library.stat().st_mtime)
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > newest:
        return
    tree = ROOT / "build/src"
    folders = (tree / "src", tree / "include", tree / "ggml/include", tree / "vendor", ROOT / "engine")
    command = ["g++", "-std=c++17", "-O1", *(f"-I{folder}" for folder in folders), str(source), "-o", str(PROGRAM)]
    command += [f"-L{LIBRARIES}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(command, check=True)


def write_preset(preset: str, path: Path) -> Path:
    source = llama_cpp_dir(None)
    use_gguf_py(source)
    from synth.writer import write_shape

    write_shape(*plan_tensors(make_spec(preset), source), path)
    return path


def measure(model: Path, chunk: str, options: argparse.Namespace) -> int:
    """One table on stdout; the program's exit code."""
    print(f"{model.name}, LLAMA_PHASE_CHUNK={chunk}", flush=True)
    phase = {"PREFILL_MODE": "transaction", "PREFILL_UBATCH": "65536", "CHUNK": chunk}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    env = kept | {f"LLAMA_PHASE_{name}": value for name, value in phase.items()}
    command = [str(PROGRAM), str(model), options.ubatch, options.ctx, str(options.top)]
    return subprocess.run(command, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="GGUF file")
    which.add_argument("--preset", default="flash-next", help="preset of tools/synth_gguf.py")
    parser.add_argument("--ubatch", default="2048,8192")
    parser.add_argument("--ctx", default="16384,131072")
    parser.add_argument("--chunk", default="0,auto", help="values of LLAMA_PHASE_CHUNK")
    parser.add_argument("--top", type=int, default=0, help="tensors to list")
    options = parser.parse_args()
    if not (LIBRARIES / "libllama.so").exists() or not shutil.which("g++"):
        print("compute_buffers: no CPU engine or no g++: run make build ENGINE=cpu", file=sys.stderr)
        return 3
    build()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_preset(options.preset, Path(folder) / f"{options.preset}.gguf")
        return 2 if any(measure(model, chunk, options) for chunk in options.chunk.split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())
