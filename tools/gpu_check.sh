#!/usr/bin/env bash
# Builds and tests the CUDA engine on a GPU machine without network; .gpu/ is made by tools/pack_gpu.sh.
#
# usage: [STEPS="build kernels engine bench"] tools/gpu_check.sh      steps run in the order given
#   build     cmake and ninja in $WORK/build/cuda, which build/cuda links to; the compiler cache goes to $OUT/ccache.part.*
#   kernels   engine/tests/test-expert-cuda, -expert-cuda-fetch, -select-cuda and -kv-rows-cuda ($KERNELS), then their small mode under compute-sanitizer
#   engine    tools/gpu_engine.py $ENGINE_ARGS
#   bench     python -m llama_phase.bench $BENCH_ARGS
# and, when asked for:
#   kv        tools/gpu_kv.py $KV_ARGS
#   chunks    tools/first_difference.py on three models; gpu_engine.py --parts chunks is part of engine
#   rest      tools/gpu_supervisor.py, then the bindings and tools/gpu_bindings.py; each within its own time, whatever the others do
#   bindings  the second half of rest
#
# OUT           logs and results (default .gpu/out)               WORK      default /tmp/lp: the cache wants the same path each time
# ARCHS         CMAKE_CUDA_ARCHITECTURES (default 90)             JOBS      default: all cores
# BUILD_LIMIT_S the build stops then, what is cached is kept (480)
# PYTHON        default python3; it has numpy
#
# Exit codes: 0 all steps passed, 1 a step failed, 2 unknown step.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
ROOT=$PWD
STEPS=${STEPS:-build kernels engine bench}
OUT=$(mkdir -p "${OUT:-.gpu/out}" && cd "${OUT:-.gpu/out}" && pwd)
WORK=${WORK:-/tmp/lp}
ARCHS=${ARCHS:-90}
JOBS=${JOBS:-$(nproc)}
PYTHON=${PYTHON:-python3}
PART_BYTES=15000000
BEGIN=$(date +%s)
unset CC CXX

export PATH=$WORK/site/bin:$PATH:/usr/local/cuda/bin
export PYTHONPATH=$ROOT:$WORK/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export CCACHE_DIR=$WORK/ccache CCACHE_BASEDIR=$WORK CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK=content CCACHE_COMPRESSLEVEL=6
export GIT_CEILING_DIRECTORIES=$WORK

say() { printf '[%4d s] %s\n' $(($(date +%s) - BEGIN)) "$*"; }

unpack() {
    mkdir -p "$WORK/build/src" "$WORK/build/cuda" "$WORK/engine" "$CCACHE_DIR" build
    if ! test -e "$WORK/site/stamp"; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$WORK/site" .gpu/wheels/*.whl || return 1
        touch "$WORK/site/stamp"
    fi
    tar -xJf .gpu/synth.tar.xz || return 1
    tar -C "$WORK/build/src" -xJf .gpu/src.tar.xz || return 1 # keeps times: what did not change is not compiled again
    find engine -type f -not -path 'engine/tests/*' | while read -r file; do
        cmp -s "$file" "$WORK/$file" || cp "$file" "$WORK/$file"
    done
    if ls .gpu/ccache.part.* > /dev/null 2>&1 && ! test -e "$WORK/ccache.restored"; then
        cat .gpu/ccache.part.* | tar -C "$CCACHE_DIR" -xf - && touch "$WORK/ccache.restored"
    fi
    rm -rf build/cuda
    ln -s "$WORK/build/cuda" build/cuda
}

options() { # those of `make build ENGINE=cuda`
    "$PYTHON" - "$WORK" "$ARCHS" <<'PY'
import os
import sys
from pathlib import Path

from llama_phase import toolchain
from llama_phase.build_plan import cmake_options
from llama_phase.cpu_probe import probe
from llama_phase.source import Lock

root, work = Path.cwd(), Path(sys.argv[1])
compiler = toolchain.find_compiler(os.environ)
cpu = probe(list(compiler.command), compiler.version, root / "tools" / "cpu_probe.cpp", work / "cpu-probe.json")
options = cmake_options(
    Lock.read(root), cpu, "gpucheck", "cuda", engine_dir=work / "engine", cuda_architectures=sys.argv[2],
    ccache=toolchain.find_tool("ccache", os.environ) is not None, cuda_compiler=str(toolchain.nvcc(os.environ) or ""))
for name, value in options.items():
    print(f"-D{name}={value}")
PY
}

configure() {
    local given
    given=$(options) || return 1
    mapfile -t given <<< "$given"
    # shellcheck disable=SC2086
    cmake -G Ninja -S "$WORK/build/src" -B "$WORK/build/cuda" "${given[@]}" -DGGML_CUDA_NCCL=OFF ${CMAKE_ARGS:-}
}

record() { # engine.json, by which the Python package finds the engine
    "$PYTHON" - "$WORK/build/cuda" <<'PY'
import datetime
import sys
from pathlib import Path

from llama_phase import engine_id

root, folder = Path.cwd(), Path(sys.argv[1])
engine = engine_id.engine_digest(root)
values = dict(
    id=f"b11434-gpucheck-e{engine[:8]}-cuda", tag="b11434", backend="cuda", stock=False, compiler="", patches_sha256="",
    engine_sha256=engine, tree_sha256="", options={}, cpu="", cpu_options={}, folder=str(folder),
    date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), binaries=engine_id.bin_sizes(folder))
engine_id.save(engine_id.EngineInfo(**{name: values.get(name, "") for name in engine_id.EngineInfo.__dataclass_fields__}))
PY
}

save_cache() {
    command -v ccache > /dev/null || return 0
    if ! ccache --print-stats | awk '$1 == "cache_miss" && $2 > 0 {found = 1} END {exit !found}'; then
        say "the compiler cache did not change"
        return 0
    fi
    tar -C "$CCACHE_DIR" --exclude='*.lock' --exclude=tmp -cf - . | split -b $PART_BYTES - "$OUT/ccache.part."
    say "compiler cache: $(du -sh "$CCACHE_DIR" | cut -f1) in $(find "$OUT" -name 'ccache.part.*' | wc -l) parts"
}

step_build() {
    unpack || return 1
    say "unpacked"
    command -v ccache > /dev/null && ccache -M 2G -z > /dev/null
    configure > "$OUT/build.log" 2>&1 || { tail -30 "$OUT/build.log"; return 1; }
    say "configured"
    timeout "${BUILD_LIMIT_S:-480}" ninja -C "$WORK/build/cuda" -j "$JOBS" -k 0 llama-server llama-bench ggml-rpc-server >> "$OUT/build.log" 2>&1
    local rc=$?
    save_cache
    if test $rc -ne 0; then
        test $rc -eq 124 && say "stopped after ${BUILD_LIMIT_S:-480} s: run it again with the saved cache"
        grep -aE 'error|FAILED|undefined' "$OUT/build.log" | head -40
        tail -3 "$OUT/build.log"
        return 1
    fi
    record || say "no engine.json: the Python package will not find the engine"
    "$WORK/build/cuda/bin/llama-server" --version 2>&1 | tail -3
}

step_kernels() {
    local name program tool rc=0
    mkdir -p "$WORK"
    : > "$OUT/kernels.log"
    for name in ${KERNELS:-test-expert-cuda test-expert-cuda-fetch test-select-cuda test-kv-rows-cuda}; do
        program=$WORK/$name
        nvcc -std=c++17 -O2 -lineinfo -arch="sm_${ARCHS%%;*}" -I engine "engine/tests/$name.cu" -o "$program" >> "$OUT/kernels.log" 2>&1 ||
            { cat "$OUT/kernels.log"; return 1; }
        say "compiled $name"
        timeout 180 "$program" 2>&1 | tee -a "$OUT/kernels.log"
        test "${PIPESTATUS[0]}" -eq 0 || rc=1
        for tool in memcheck racecheck; do
            say "compute-sanitizer $tool"
            timeout 100 compute-sanitizer --tool $tool $(test $tool = memcheck && echo --report-api-errors no) --error-exitcode 9 "$program" small 2>&1 | tee -a "$OUT/kernels.log" | tail -4
            test "${PIPESTATUS[0]}" -eq 0 || { rc=1; say "$tool failed"; }
        done
    done
    return $rc
}

step_engine() { # shellcheck disable=SC2086
    "$PYTHON" tools/gpu_engine.py ${ENGINE_ARGS:-} 2>&1 | tee "$OUT/engine.log"
    return "${PIPESTATUS[0]}"
}

step_kv() { # shellcheck disable=SC2086
    "$PYTHON" tools/gpu_kv.py ${KV_ARGS:-} 2>&1 | tee "$OUT/kv.log"
    return "${PIPESTATUS[0]}"
}

step_chunks() {
    local rc=0 sizes
    # the last one has the widths that take CUDA's own indexer and sparse attention
    for sizes in "--preset tiny-exact" "--preset tiny-35-exact" \
        "--set idx_dim=128 --set head_dim=256 --set heads=16 --set layers=4 --tokens 5000 --ubatch 2048 --chunk 512"; do
        # shellcheck disable=SC2086
        timeout 100 "$PYTHON" tools/first_difference.py $sizes 2>&1 | tee -a "$OUT/chunks.log"
        test "${PIPESTATUS[0]}" -eq 0 || rc=1
    done
    return $rc
}

limited() { # seconds, name of the log, command
    local before rc
    before=$(date +%s)
    timeout -k 10 "$1" "${@:3}" 2>&1 | tee "$OUT/$2.log"
    rc=${PIPESTATUS[0]}
    test "$rc" -eq 124 && say "$2: stopped after $1 s"
    say "$2: exit code $rc after $(($(date +%s) - before)) s"
    return "$rc"
}

step_rest() {
    local rc=0
    limited "${SUPERVISOR_LIMIT_S:-120}" supervisor "$PYTHON" tools/gpu_supervisor.py || rc=1
    limited "${BINDINGS_BUILD_LIMIT_S:-200}" bindings-build "$PYTHON" tools/bindings.py --backend cuda || return 1
    limited "${BINDINGS_LIMIT_S:-120}" bindings "$PYTHON" tools/gpu_bindings.py || rc=1
    return $rc
}

step_bindings() { # needs the headers of $PYTHON
    "$PYTHON" tools/bindings.py --backend cuda && "$PYTHON" tools/gpu_bindings.py 2>&1 | tee "$OUT/bindings.log"
    return "${PIPESTATUS[0]}"
}

step_bench() { # shellcheck disable=SC2086
    "$PYTHON" -m llama_phase.bench ${BENCH_ARGS:-} 2>&1 | tee "$OUT/bench.log"
    return "${PIPESTATUS[0]}"
}

for step in $STEPS; do
    case $step in build | kernels | engine | kv | chunks | rest | bindings | bench) ;; *) echo "unknown step $step" >&2; exit 2 ;; esac
done
export OUT
failed=0
table=""
for step in $STEPS; do
    say "== $step"
    before=$(date +%s)
    if "step_$step"; then result=passed; else result=FAILED; failed=1; fi
    table+=$(printf '| %-8s | %6s | %5d s |' "$step" $result $(($(date +%s) - before)))$'\n'
done
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
printf '%s' "$table"
exit $failed
