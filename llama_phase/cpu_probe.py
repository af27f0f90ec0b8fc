"""Which x86 extensions the engine may be built with, found by compiling and running a program for each.

GGML_NATIVE asks only what the CPU has. That is not enough: GCC 12 tells the optimiser that _tile_loadconfig reads 8
bytes of the 64, so the rows and columns of the tiles are dropped and stock llama.cpp dies of an illegal instruction on
every CPU with AMX. Hypervisors that announce what they do not pass through are caught in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_phase.tree import write_atomically

RUN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Extension:
    """``option``: ggml's name after GGML_; ``cpu_flags``: as in /proc/cpuinfo; ``needs``: options it builds on."""

    option: str
    flags: tuple[str, ...]
    cpu_flags: tuple[str, ...]
    needs: tuple[str, ...] = ()


EXTENSIONS = (
    Extension("SSE42", ("-msse4.2",), ("sse4_2",)),
    Extension("AVX", ("-mavx",), ("avx",), ("SSE42",)),
    Extension("AVX2", ("-mavx2",), ("avx2",), ("AVX",)),
    Extension("BMI2", ("-mbmi2",), ("bmi2",)),
    Extension("FMA", ("-mfma",), ("fma",), ("AVX",)),
    Extension("F16C", ("-mf16c",), ("f16c",), ("AVX",)),
    Extension("AVX_VNNI", ("-mavxvnni",), ("avx_vnni",), ("AVX2",)),
    Extension(
        "AVX512",
        ("-mavx512f", "-mavx512cd", "-mavx512vl", "-mavx512dq", "-mavx512bw"),
        ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
        ("AVX2", "FMA", "F16C"),
    ),
    Extension("AVX512_VBMI", ("-mavx512f", "-mavx512vbmi"), ("avx512vbmi",), ("AVX512",)),
    Extension("AVX512_VNNI", ("-mavx512f", "-mavx512vnni"), ("avx512_vnni",), ("AVX512",)),
    Extension("AVX512_BF16", ("-mavx512f", "-mavx512bf16"), ("avx512_bf16",), ("AVX512",)),
    Extension("AMX_TILE", ("-mamx-tile",), ("amx_tile",), ("AVX512",)),
    Extension("AMX_INT8", ("-mamx-tile", "-mamx-int8"), ("amx_int8",), ("AMX_TILE",)),
    Extension("AMX_BF16", ("-mamx-tile", "-mamx-bf16"), ("amx_bf16",), ("AMX_TILE",)),
)
AMX = tuple(extension.option for extension in EXTENSIONS if extension.option.startswith("AMX"))


@dataclass(frozen=True)
class Outcome:
    on: bool
    reason: str


@dataclass(frozen=True)
class Probe:
    """Outcome per option, in the order of EXTENSIONS; none on other architectures, where GGML_NATIVE stays on."""

    outcomes: dict[str, Outcome]
    note: str = ""

    def cmake_options(self) -> dict[str, str]:
        if not self.outcomes:
            return {"GGML_NATIVE": "ON"}
        return {"GGML_NATIVE": "OFF"} | {f"GGML_{o}": "ON" if r.on else "OFF" for o, r in self.outcomes.items()}

    def summary(self) -> str:
        """One line for people: what is on, and why what the CPU has is off."""
        if not self.outcomes:
            return self.note
        on = [option for option, outcome in self.outcomes.items() if outcome.on]
        off: dict[str, list[str]] = {}
        for option, outcome in self.outcomes.items():
            if not outcome.on and outcome.reason != LACKING:
                off.setdefault(outcome.reason, []).append(option)
        reasons = "".join(f"; {' '.join(options)} off: {reason}" for reason, options in off.items())
        return f"CPU options {' '.join(on) or 'none'}{reasons}"


LACKING = "CPU lacks it"
# (option, compiler flags) -> None when the program was built and is right, else what went wrong
Attempt = Callable[[Extension], str | None]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def decide(has: frozenset[str], attempt: Attempt, *, workers: int = 1) -> dict[str, Outcome]:
    """Outcome per option: CPU flag first, then the program, then what it builds on; all of AMX or none of it."""
    tried = [extension for extension in EXTENSIONS if has.issuperset(extension.cpu_flags)]
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        failures = dict(zip((e.option for e in tried), pool.map(attempt, tried), strict=True))
    outcomes: dict[str, Outcome] = {}
    for extension in EXTENSIONS:
        failure = failures.get(extension.option, LACKING)
        missing = [need for need in extension.needs if not outcomes[need].on]
        if failure is None and missing:
            failure = f"needs {missing[0]}"
        outcomes[extension.option] = Outcome(failure is None, failure or "works")
    broken = [option for option in AMX if not outcomes[option].on]
    for option in AMX:
        if broken and outcomes[option].on:
            outcomes[option] = Outcome(False, f"{broken[0]} is off")
    return outcomes


def attempt_with(compiler: list[str], program: Path, folder: Path) -> Attempt:
    """Compile ``program`` for one extension and run it in a child process."""

    def attempt(extension: Extension) -> str | None:
        binary = folder / extension.option.lower()
        command = [
            *compiler,
            "-std=c++17",
            "-O3",
            f"-DPROBE_{extension.option}",
            *extension.flags,
            str(program),
            "-o",
            str(binary),
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            unknown = [
                f
                for f in extension.flags
                if (f in built.stderr and "unrecognized" in built.stderr) or f"unknown argument: '{f}'" in built.stderr
            ]
            first = next((line for line in built.stderr.splitlines() if "error" in line), "no message")
            return f"compiler does not know {unknown[0]}" if unknown else f"does not compile: {first}"
        try:
            ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"did not end in {RUN_TIMEOUT_S:.0f} s"
        except OSError as error:
            return f"does not run: {error.strerror}"
        return describe(ran.returncode, ran.stderr)

    return attempt


def describe(returncode: int, stderr: str) -> str | None:
    """What the exit code of a probe program means; None for success."""
    if returncode == 0:
        return None
    if returncode < 0:
        try:
            return f"died with {signal.Signals(-returncode).name}"
        except ValueError:
            return f"died with signal {-returncode}"
    return "wrong result" if returncode == 1 else stderr.strip() or f"exit code {returncode}"


def probe(
    compiler: list[str],
    compiler_version: str,
    program: Path,
    cache: Path,
    *,
    machine: str = "",
    has: frozenset[str] | None = None,
    make_attempt: Callable[..., Attempt] = attempt_with,
) -> Probe:
    """Probe with ``compiler`` (command); the result is kept in ``cache`` for this compiler version, CPU and program."""
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64", "i686"):
        return Probe({}, f"{machine}: GGML_NATIVE decides, extensions are not probed")
    has = cpu_flags() if has is None else has
    text = "\0".join([*compiler, compiler_version, *sorted(has), program.read_text()])
    key = hashlib.sha256(text.encode()).hexdigest()
    try:
        saved = json.loads(cache.read_text())
        if saved["key"] == key:
            return Probe({option: Outcome(**outcome) for option, outcome in saved["outcomes"].items()})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with tempfile.TemporaryDirectory(prefix="llama-phase-probe-") as folder:
        outcomes = decide(has, make_attempt(compiler, program, Path(folder)), workers=os.cpu_count() or 1)
    saved = {"key": key, "outcomes": {option: asdict(outcome) for option, outcome in outcomes.items()}}
    write_atomically(cache, (json.dumps(saved, indent=1) + "\n").encode())
    return Probe(outcomes)
