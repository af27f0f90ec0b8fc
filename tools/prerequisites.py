#!/usr/bin/env python3
"""Say what must be installed before anything else can run: one line per missing thing.

Runs before the virtual environment exists, with any Python 3, so it uses the standard library and old syntax only.
Exit codes: 0 all there, 3 something is missing.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

OLDEST_PYTHON = (3, 10)
OLDEST_GCC = 11
BUILD_DISK_GB = 6
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def check_python(version=None, find_spec=None):
    version = version or sys.version_info
    if tuple(version[:2]) < OLDEST_PYTHON:
        return [
            f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed, {sys.executable} is "
            f"{version[0]}.{version[1]}: install one and say `make PYTHON=python3.12 ...`"
        ]
    if find_spec is None:
        from importlib.util import find_spec
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if missing:
        return [
            f"Python's module {' and '.join(missing)} is missing: install python3-venv (Debian, Ubuntu) or the like"
        ]
    return []


def compiler_version(command):
    """Version text of a GCC or Clang, None when the command does not run."""
    try:
        done = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    macros = dict(re.findall(r"^#define (__clang_major__|__clang__|__GNUC__) (\S+)", done.stdout, re.MULTILINE))
    if done.returncode or "__GNUC__" not in macros:
        return None
    return "clang" + macros["__clang_major__"] if "__clang__" in macros else "gcc" + macros["__GNUC__"]


def check_compiler(environ=os.environ, probe=compiler_version):
    given = environ.get("CXX", "").strip()
    if given:
        if probe(shlex.split(given)) is None:
            return [f"CXX={given!r} is not a C++ compiler: correct it or unset it"]
        candidates = [shlex.split(given)]
    else:
        candidates = [["c++"], ["g++"], ["clang++"]]
    found = next((version for version in map(probe, candidates) if version), None)
    if found is None:
        return [f"g++ {OLDEST_GCC} or newer is missing: install g++ (Debian, Ubuntu) or gcc-c++ (Fedora)"]
    if found.startswith("gcc") and int(found[3:]) < OLDEST_GCC:
        return [f"g++ {OLDEST_GCC} or newer is needed, this is {found}: install it and say CC=gcc-12 CXX=g++-12"]
    return []


def check_tools(which=shutil.which):
    return [
        f"{name} is missing: install it with your system's package manager"
        for name in ("make", "git")
        if which(name) is None
    ]


def check_disk(root=ROOT, free_bytes=None):
    """Space is asked for only while the engine is not built: afterwards it has been taken already."""
    if os.path.exists(os.path.join(root, "build", "cpu", "engine.json")):
        return []
    free = shutil.disk_usage(root).free if free_bytes is None else free_bytes
    if free < BUILD_DISK_GB * 10**9:
        return [f"{BUILD_DISK_GB} GB of free disk are needed in {root}, {free / 1e9:.1f} are there"]
    return []


def main():
    problems = check_python() + check_compiler() + check_tools() + check_disk()
    for problem in problems:
        sys.stderr.write(f"missing: {problem}\n")
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
