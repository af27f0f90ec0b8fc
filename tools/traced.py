"""Servers that are watched from outside: a library in front of the runtime or inside the driver, made on the spot."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llama_phase.client import Client
from llama_phase.errors import MissingPrerequisite
from llama_phase.server import Server
from llama_phase.settings import Settings

TOOLS = Path(__file__).resolve().parent


def cuda_toolkit() -> Path:
    """Its folder. Raises MissingPrerequisite without it or a compiler."""
    folder = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parents[1]
    if not shutil.which("g++") or not (folder / "include" / "cuda_runtime_api.h").exists():
        raise MissingPrerequisite("no g++ or no CUDA headers", fix="install them, put nvcc on the PATH")
    return folder


def make_library(source: str, folder: Path, *more: str) -> Path:
    """tools/`source` as a shared library in `folder`; `more`: flags of the compiler."""
    library = (folder / source).with_suffix(".so")
    include = f"-I{cuda_toolkit() / 'include'}"
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", include, str(TOOLS / source), *more, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def options_of(description: str, n_tokens: int) -> argparse.ArgumentParser:
    """A parser of what both tools take in front of `--`; an answer has `n_tokens` unless told otherwise."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--depth", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=n_tokens, help="of an answer")
    parser.add_argument("--vocabulary", type=int, default=4000, help="prompts are random ids below it")
    parser.epilog = "Behind -- stand the flags of llama-server."
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Its options, and `flags`: all behind the first `--`, which may look like options of ours."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.flags = list(arguments[end + 1 :])
    return options


@contextmanager
def traced_client(model: Path, flags: list[str], environment: dict[str, str]) -> Iterator[Client]:
    """A client of the CUDA engine's server, one slot, with that environment and this process's."""
    os.environ.update(environment)
    upstream = ("-np", "1", "--no-warmup", *flags)
    settings = Settings.load(model=model, port=0, backend="cuda", upstream=upstream)
    with Server(settings) as server, server.client() as client:
        yield client
