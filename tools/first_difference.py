#!/usr/bin/env python3
"""Where chunks begin to give other values than a whole micro-batch, and whether roundings and near ties explain it.

  tools/first_difference.py [--backend cpu|cuda] [--preset NAME | --model FILE] [--set NAME=VALUE]... [--tokens N]
                            [--ubatch N] [--chunk N,..] [--change noise=NAME:EPSILON | corrupt=NAME:ROW]...

What is compared and what each line means: head of tools/first_difference.cpp. All weights are on the device.

exit codes: 0 explained, 1 the model does not load or cannot be computed, 2 wrong usage, 3 the engine or a compiler is
missing, 4 not explained.
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

from synth_gguf import make_model

ROOT = Path(__file__).resolve().parents[1]


def build(libraries: Path) -> Path:
    """Compiles the C++ part against an engine when it is older than either; its path."""
    source, program = ROOT / "tools/first_difference.cpp", libraries.parent / "first_difference"
    newest = max(source.stat().st_mtime, (libraries / "libllama.so").stat().st_mtime)
    if program.exists() and program.stat().st_mtime > newest:
        return program
    tree = libraries.parents[1] / "src"  # an engine's folder lies beside the source that it was made of
    command = ["g++", "-std=c++17", "-O2", f"-I{tree / 'include'}", f"-I{tree / 'ggml/include'}", str(source)]
    command += ["-o", str(program), f"-L{libraries}", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cuda")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="GGUF file")
    which.add_argument("--preset", default="tiny-exact", help="preset of tools/synth_gguf.py")
    parser.add_argument("--set", action="append", default=[], help="a size of the preset, such as idx_dim=128")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--ubatch", type=int, default=1024)
    parser.add_argument("--chunk", default="64")
    parser.add_argument("--change", action="append", default=[], help="of the chunked variants, to try the program")
    options = parser.parse_args()
    libraries = (ROOT / "build" / options.backend).resolve() / "bin"
    if not (libraries / "libllama.so").exists() or not shutil.which("g++"):
        fix = f"run make build ENGINE={options.backend}"
        print(f"first_difference: no {options.backend} engine or no g++: {fix}", file=sys.stderr)
        return 3
    program = build(libraries)
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    arguments = [str(options.tokens), str(options.ubatch), options.chunk, *options.change]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        sizes = {name: int(value) for name, _, value in (text.partition("=") for text in options.set)}
        model = options.model or make_model(options.preset, Path(folder) / f"{options.preset}.gguf", **sizes)
        print(f"{model.name} {' '.join(options.set)}, {options.backend}", flush=True)
        return subprocess.run([str(program), str(model), *arguments], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
