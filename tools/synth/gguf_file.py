"""The gguf module of the pinned source, and a reader of vocabularies that does without it."""

from __future__ import annotations

import importlib
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_phase.errors import MissingPrerequisite, ModelError

ROOT = Path(__file__).resolve().parents[2]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def llama_cpp_dir(override: Path | None = None) -> Path:
    """The source: ``override``, else LLAMA_CPP_DIR, else the project's pinned one. Raises MissingPrerequisite."""
    chosen = Path(override or os.environ.get("LLAMA_CPP_DIR") or ROOT / "llama.cpp")
    if not (chosen / "gguf-py" / "gguf" / "__init__.py").is_file():
        raise MissingPrerequisite(
            f"no llama.cpp source with gguf-py at {chosen}",
            fix="run `make source`, or name a checkout with --llama-cpp DIR or LLAMA_CPP_DIR",
        )
    return chosen


def use_gguf_py(source: Path) -> None:
    """Make ``import gguf`` mean the one of ``source``: a released gguf may not know the architectures made here.

    Raises MissingPrerequisite if it cannot be imported, or another gguf is imported already and is too old.
    """
    place = str(source / "gguf-py")
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        gguf = importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise MissingPrerequisite(
            f"the Python module {error.name} is not installed", fix="pip install 'llama-phase[synth]'"
        ) from None
    if not hasattr(gguf.MODEL_ARCH, "QWEN4EXP"):
        raise MissingPrerequisite(
            f"the gguf module at {gguf.__file__} does not know qwen4exp",
            fix="run `make source`, or pass a newer checkout with --llama-cpp DIR",
        )


def read_kv(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file with its long arrays, which llama_phase.gguf_header leaves out.

    gguf.GGUFReader takes 11 s and 500 MB for a vocabulary of 150,000 tokens. Raises ModelError if it is no GGUF file.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file", fix="name another file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return dict(_pairs(data))
            except (struct.error, UnicodeDecodeError, KeyError):
                raise ModelError(f"{path} has a damaged header", fix="name another file") from None


def _pairs(data: mmap.mmap) -> Iterator[tuple[str, Any]]:
    at = 24  # magic, version, tensor count, pair count

    def scalar(code: str) -> Any:
        nonlocal at
        value = struct.unpack_from("<" + code, data, at)[0]
        at += struct.calcsize(code)
        return value

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            size = scalar("Q")
            text = data[at : at + size].decode()
            at += size
            return text
        if kind == _ARRAY:
            kind, count = scalar("I"), scalar("Q")
            return [value(kind) for _ in range(count)]
        return scalar(_SCALARS[kind])

    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        key = value(_STRING)
        yield key, value(scalar("I"))
