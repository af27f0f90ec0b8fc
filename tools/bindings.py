#!/usr/bin/env python3
"""Build the Python bindings on an engine that is built already: into this checkout's llama_phase/, or as a wheel.

The wheel carries the engine's libraries and needs nothing of the checkout. Exit codes: docs/exit-codes.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from llama_phase import toolchain
from llama_phase.build import only_one
from llama_phase.engine_id import EngineInfo, engine_info
from llama_phase.errors import LlamaPhaseError, MissingPrerequisite
from llama_phase.ninja_run import run_step

ROOT = Path(__file__).resolve().parents[1]


def build_in_place(engine: EngineInfo, environ: dict[str, str], folder: Path) -> None:
    """Compile what changed, and install llama_phase/_engine*.so."""
    try:
        import pybind11
    except ImportError:
        raise MissingPrerequisite("pybind11 is not installed", fix="`make venv`") from None
    cmake = str(toolchain.require_tool("cmake", environ))
    ninja = toolchain.require_tool("ninja", environ)
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT / "pybind"), "-B", str(folder), f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    configure += [f"-DLLAMA_PHASE_ENGINE={engine.folder}", "-DCMAKE_BUILD_TYPE=Release"]
    if toolchain.find_tool("ccache", environ):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    log = folder / "build.log"
    run_step(configure, log, environ, "configuring the bindings")
    run_step([cmake, "--build", str(folder)], log, environ, "building the bindings")
    run_step([cmake, "--install", str(folder), "--prefix", str(ROOT)], log, environ, "installing the bindings")


def build_wheel(engine: EngineInfo, environ: dict[str, str], folder: Path) -> None:
    """With the tools of this environment, so without a network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    command += ["--wheel-dir", str(ROOT / "dist"), "--config-settings=wheel.cmake=true"]
    command += [
        f"--config-settings=build-dir={folder}",
        f"--config-settings=cmake.define.LLAMA_PHASE_ENGINE={engine.folder}",
    ]
    if toolchain.find_tool("ccache", environ):
        command.append("--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache")
    run_step(command, folder / "build.log", environ, "building the wheel")


def write_stubs(environ: dict[str, str], folder: Path) -> None:
    """_engine.pyi of the module that is built, into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pybind11_stubgen", "llama_phase._engine", "-o", scratch]
        run_step(command, Path(scratch) / "log", environ, "writing the stubs")
        text = (Path(scratch) / "llama_phase" / "_engine.pyi").read_text()
    (folder / "_engine.pyi").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--wheel", action="store_true", help="a wheel with the engine's libraries, in dist/")
    parser.add_argument("--stubs", type=Path, metavar="FOLDER", help="write _engine.pyi of the built module instead")
    arguments = parser.parse_args()
    folder = ROOT / "build" / ("wheel" if arguments.wheel else "bindings")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(folder / ".lock"):
            environ = toolchain.build_environment(ROOT, os.environ)
            # the same name in both builds, so that the compiler cache serves the second one
            environ["CXX"] = shlex.join(toolchain.find_compiler(environ).command)
            if arguments.stubs:
                write_stubs(environ, arguments.stubs)
                return 0
            (build_wheel if arguments.wheel else build_in_place)(engine_info(arguments.backend), environ, folder)
    except LlamaPhaseError as error:
        Console(stderr=True).print(f"error: {error}\n  fix: {error.fix}", highlight=False, markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
