"""Configure and compile an engine: build/<backend> from build/src, build/stock/<backend> from the unpatched source.

A run is skipped when the record of the last one (engine.json) has the same id and options and its binaries are there.
Both trees see their source as ../src from the cmake folder, so the compiler cache serves the reference build.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from llama_phase import engine_id, toolchain
from llama_phase.build_plan import Plan, default_backends, make_plan
from llama_phase.engine_id import BINARIES, EngineInfo, engine_folder
from llama_phase.engine_id import engine_info as engine_info  # part of this module's interface
from llama_phase.errors import BuildError, LlamaPhaseError, UsageError
from llama_phase.ninja_run import run_ninja, run_step
from llama_phase.source import project_root

BACKENDS = ("cpu", "cuda")


def build(
    backend: str = "cpu",
    *,
    root: Path | None = None,
    stock: bool = False,
    environ: Mapping[str, str] = os.environ,
    console: Console | None = None,
    jobs: int = 0,
) -> EngineInfo:
    """Bring the engine up to date with source, patches and engine/, and return its record.

    ``auto`` builds the CPU engine and, where ``default_backends`` says so, the CUDA engine; the last one is returned.
    Raises MissingPrerequisite, SourceError, PatchError, or BuildError with the first compiler errors.
    """
    console = console or Console(stderr=True)
    if backend == "auto":
        backends, remark = default_backends(environ)
        if remark:
            console.print(remark, highlight=False, markup=False, soft_wrap=True)
        return [build(b, root=root, stock=stock, environ=environ, console=console, jobs=jobs) for b in backends][-1]
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", fix=f"one of auto, {', '.join(BACKENDS)}")
    root = root or project_root()
    folder = engine_folder(root, backend, stock)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / ".lock"):
        plan = make_plan(root, backend, stock, environ, console)
        last = engine_id.read(folder)
        if last is not None and last.intact() and _same(last, plan.info):
            console.print(f"engine {last.id} is up to date", highlight=False, markup=False, soft_wrap=True)
            return last
        console.print(f"engine {plan.info.id}: building in {folder}", highlight=False, markup=False, soft_wrap=True)
        console.print(plan.info.cpu, highlight=False, markup=False, soft_wrap=True)
        _compile(
            plan,
            folder,
            last,
            toolchain.build_environment(root, environ),
            console,
            jobs or toolchain.job_count(backend),
        )
        done = dataclasses.replace(plan.info, binaries=engine_id.bin_sizes(folder))
        engine_id.save(done)
    return done


def _same(last: EngineInfo, planned: EngineInfo) -> bool:
    names = ("id", "patches_sha256", "engine_sha256", "tree_sha256", "options", "folder")
    return all(getattr(last, name) == getattr(planned, name) for name in names)


def _compile(
    plan: Plan, folder: Path, last: EngineInfo | None, environ: Mapping[str, str], console: Console, jobs: int
) -> None:
    log = folder / "build.log"
    command = [
        str(toolchain.require_tool("cmake", environ)),
        "-G",
        "Ninja",
        "-S",
        str(plan.source),
        "-B",
        str(folder),
        f"-DCMAKE_MAKE_PROGRAM={toolchain.require_tool('ninja', environ)}",
    ]
    if _needs_fresh(folder, plan, last):
        command.append("--fresh")
    command += [f"-U{name}" for name in _forgotten(last, plan)]
    command += [f"-D{name}={value}" for name, value in plan.options.items()]
    _note_attempt(plan, last)
    run_step([*command, *plan.extra], log, environ, "configuring")
    run_ninja(
        [str(toolchain.require_tool("ninja", environ)), "-C", str(folder), f"-j{jobs}", *BINARIES],
        log,
        environ,
        f"building {plan.info.backend}{' stock' if plan.info.stock else ''}",
        console,
    )
    missing = [name for name in BINARIES if not (folder / "bin" / name).is_file()]
    if missing:
        raise BuildError(f"the build ended well but {', '.join(missing)} is not there", fix=f"see {log}")


def _note_attempt(plan: Plan, last: EngineInfo | None) -> None:
    """Record the options before cmake caches them, without binaries: an interrupted build does not pass for done."""
    options = plan.info.options
    if last is not None:
        arguments = f"{last.options.get('CMAKE_ARGS', '')} {options['CMAKE_ARGS']}".strip()
        options = last.options | options | {"CMAKE_ARGS": arguments}
    engine_id.save(dataclasses.replace(plan.info, options=options))


def _needs_fresh(folder: Path, plan: Plan, last: EngineInfo | None) -> bool:
    """cmake keeps compiler and source folder for good: start over when one of them, or the place, changed."""
    try:
        cache = (folder / "CMakeCache.txt").read_text(errors="replace")
    except OSError:
        return False
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)
    place = re.search(r"^CMAKE_CACHEFILE_DIR:INTERNAL=(.*)$", cache, re.MULTILINE)
    moved = not home or not place or (Path(home[1]), Path(place[1])) != (plan.source, folder)
    return moved or (last is not None and last.options.get("CXX") != plan.info.options["CXX"])


def _forgotten(last: EngineInfo | None, plan: Plan) -> list[str]:
    """Variables of the last run that this one does not set; cmake would keep their values."""
    if last is None:
        return []
    given = re.findall(r"-D(\w+)", last.options.get("CMAKE_ARGS", ""))
    now = {*plan.options, *re.findall(r"-D(\w+)", " ".join(plan.extra))}
    return sorted({*last.options, *given} - now - {"CMAKE_ARGS", "CXX"})


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Two builds in one folder would overwrite each other's outputs; raises BuildError when one is running."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(f"another build is running in {lock.parent}", fix="wait for it, or end it") from None
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m llama_phase.build", description="Build the engine.")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto")
    parser.add_argument("--only", action="store_true", help="that backend alone, without the CPU engine")
    parser.add_argument("--stock", action="store_true", help="the unpatched reference instead")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compilers at once (default: what fits)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    backends = [arguments.backend]
    if arguments.backend == "cuda" and not arguments.only:
        backends.insert(0, "cpu")
    try:
        for backend in backends:
            print(build(backend, stock=arguments.stock, console=console, jobs=arguments.jobs).id)
    except LlamaPhaseError as error:
        console.print(f"error: {error}\n  fix: {error.fix}", highlight=False, markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
