#!/usr/bin/env bash
# usage: tools/pack_gpu.sh [folder with ccache.part.* of an earlier run]
# Fills .gpu/ with what tools/gpu_check.sh needs on a GPU machine without network: build/src without what no engine of ours
# compiles, wheels for CPython 3.12 on Linux x86-64, and the compiler cache. PYTHON: an interpreter with this package's
# dependencies (default .venv/bin/python).
# Exit codes: 0 packed, 1 a tool failed, 2 wrong usage, 3 build/src or the interpreter is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if test $# -gt 1 || { test $# -eq 1 && ! test -d "$1"; }; then
    sed -n '2,6p' tools/pack_gpu.sh >&2
    exit 2
fi
python=${PYTHON:-.venv/bin/python}
test -d build/src || { echo "build/src is missing: make prepare" >&2; exit 3; }
"$python" -c 'import rich' 2>/dev/null || { echo "$python lacks this package's dependencies: make venv, or set PYTHON" >&2; exit 3; }

mkdir -p .gpu
PYTHONPATH=.:tools "$python" - > .gpu/files.part <<'PY'
from pathlib import Path

import bundle
from llama_phase.tree import scan

# a server without web pages still needs the cmake file that would make them
for path in sorted(scan(Path("build/src"))):
    if bundle.kept(path):
        print(path)
PY
tar -C build/src --no-recursion -T .gpu/files.part -cf - | xz -T0 -6 > .gpu/src.tar.xz.part
mv .gpu/src.tar.xz.part .gpu/src.tar.xz
rm .gpu/files.part

# what the generator of synthetic models reads
tar -cf - llama.cpp/gguf-py/gguf llama.cpp/models/ggml-vocab-qwen35.gguf | xz -T0 -6 > .gpu/synth.tar.xz.part
mv .gpu/synth.tar.xz.part .gpu/synth.tar.xz

if ! test -e .gpu/wheels/stamp || test pyproject.toml -nt .gpu/wheels/stamp; then
    rm -rf .gpu/wheels
    mkdir .gpu/wheels
    PYTHONPATH=.:tools "$python" -c 'import bundle, pathlib; bundle.fetch_wheels(pathlib.Path("."), pathlib.Path(".gpu/wheels"), "3.12")'
    touch .gpu/wheels/stamp
fi

if test $# -eq 1; then
    rm -f .gpu/ccache.part.*
    cp "$1"/ccache.part.* .gpu/
    chmod u+w .gpu/ccache.part.*
fi

du -sh .gpu/* | sed 's/^/  /'
printf '.gpu: %.1f MiB\n' "$(du -sb .gpu | awk '{print $1/1048576}')"
