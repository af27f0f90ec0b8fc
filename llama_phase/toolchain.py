"""What compiles the engine: compilers, cmake, ninja, ccache and nvcc, and the environment they run in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import psutil

from llama_phase.errors import MissingPrerequisite

OLDEST_GCC = 11
DEFAULT_CUDA_ARCHITECTURES = "86;90"
OLDEST_CUDA_ARCHITECTURE = 70  # warps that match values, acquire and release
JOB_BYTES = {"cpu": 3 << 29, "cuda": 3 << 30}  # memory one compiler may need: 1.5 GiB, and 3 GiB for nvcc


@dataclass(frozen=True)
class Compiler:
    """``command`` runs the C++ compiler; ``label`` is like gcc12.2; ``version`` is all of the version."""

    command: tuple[str, ...]
    label: str
    version: str


def venv_bin() -> Path:
    """Where pip put the tools of this interpreter. Not resolved: a venv's python is a link to the system's."""
    return Path(sys.executable).parent


def find_tool(name: str, environ: Mapping[str, str]) -> Path | None:
    found = shutil.which(name, path=str(venv_bin())) or shutil.which(name, path=environ.get("PATH", os.defpath))
    return Path(found) if found else None


def require_tool(name: str, environ: Mapping[str, str]) -> Path:
    found = find_tool(name, environ)
    if found is None:
        raise MissingPrerequisite(f"{name} is not installed", fix=f"`make venv`, or `pip install {name}`")
    return found


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """The C++ compiler cmake will take: CXX, else c++ or g++. CC is checked, too.

    Raises MissingPrerequisite: CC or CXX is not a compiler (named), there is none, or it is too old.
    """
    commands = {name: shlex.split(environ.get(name, "")) for name in ("CC", "CXX")}
    for name, command in commands.items():
        if command and not _answers([*command, "--version"], environ):
            raise MissingPrerequisite(
                f"{name}={environ[name]!r} is not a compiler: `{environ[name]} --version` fails",
                fix=f"correct {name} or unset it",
            )
    command = (
        commands["CXX"]
        or [
            str(found) for name in ("c++", "g++", "clang++") if (found := shutil.which(name, path=environ.get("PATH")))
        ][:1]
    )
    if not command:
        raise MissingPrerequisite("there is no C++ compiler", fix="install g++ (11 or newer)")
    return identify(command, environ)


def _answers(command: list[str], environ: Mapping[str, str]) -> bool:
    try:
        return subprocess.run(command, env=dict(environ), capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def identify(command: list[str], environ: Mapping[str, str]) -> Compiler:
    """Family and version from the compiler's own macros."""
    done = subprocess.run(
        [*command, "-dM", "-E", "-x", "c++", os.devnull], env=dict(environ), capture_output=True, text=True, check=False
    )
    macros = dict(re.findall(r"^#define (__\w+__) (.*)$", done.stdout, re.MULTILINE))
    if done.returncode or "__VERSION__" not in macros:
        raise MissingPrerequisite(f"{shlex.join(command)} is not a C++ compiler", fix="install g++ (11 or newer)")
    if "__clang__" in macros:
        label = f"clang{macros['__clang_major__']}.{macros['__clang_minor__']}"
    else:
        label = f"gcc{macros['__GNUC__']}.{macros['__GNUC_MINOR__']}"
        if int(macros["__GNUC__"]) < OLDEST_GCC:
            raise MissingPrerequisite(f"{shlex.join(command)} is {label}, too old", fix="install g++ 11 or newer")
    return Compiler(tuple(command), label, macros["__VERSION__"].strip('"'))


def build_environment(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for cmake and ninja.

    Objects must be found in the cache from every build folder of this checkout: paths below ``root`` are hashed
    relative, the working directory is not hashed. ggml's cmake asks git for a commit; the ceiling hides our repository.
    Empty CC and CXX count as unset.
    """
    kept = {
        key: value
        for key, value in environ.items()
        if key not in ("CMAKE_ARGS", "NINJA_STATUS") and (value.strip() or key not in ("CC", "CXX"))
    }
    own = {
        "PATH": os.pathsep.join([str(venv_bin()), environ.get("PATH", os.defpath)]),
        "CCACHE_DIR": environ.get("CCACHE_DIR") or str(Path(platformdirs.user_cache_dir("llama-phase")) / "ccache"),
        "CCACHE_BASEDIR": str(root),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": "content",
        "GIT_CEILING_DIRECTORIES": str(root / "build"),
    }
    return kept | own


def nvcc(environ: Mapping[str, str]) -> Path | None:
    folder = Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda", "bin")
    path = os.pathsep.join([environ.get("PATH", os.defpath), str(folder)])
    found = environ.get("CUDACXX") or shutil.which("nvcc", path=path)
    return Path(found) if found else None


def cuda_architectures(environ: Mapping[str, str]) -> str:
    """For CMAKE_CUDA_ARCHITECTURES: the user's, else those of the GPUs here that the kernels can be compiled for, else
    the tested ones. Raises MissingPrerequisite when all GPUs are too old."""
    if given := environ.get("CMAKE_CUDA_ARCHITECTURES") or environ.get("CUDAARCHS"):
        return given
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_CUDA_ARCHITECTURES
    found = sorted({line.replace(".", "") for line in done.stdout.split() if re.fullmatch(r"\d+\.\d", line)}, key=int)
    if not found or done.returncode != 0:
        return DEFAULT_CUDA_ARCHITECTURES
    usable = [one for one in found if int(one) >= OLDEST_CUDA_ARCHITECTURE]
    if not usable:
        raise MissingPrerequisite(
            f"the GPUs here have compute capability {found[-1][:-1]}.{found[-1][-1]}, the engine's kernels need 7.0",
            fix="`make build ENGINE=cpu`, or a newer GPU",
        )
    return ";".join(usable)


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def job_count(backend: str) -> int:
    """Compilers to run at once: one per usable core, fewer when memory is short."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, psutil.virtual_memory().available // JOB_BYTES.get(backend, JOB_BYTES["cpu"])))
