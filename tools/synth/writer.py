"""The model file: kept if it was made with the same flags, else written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from llama_phase.errors import ModelError, UsageError
from llama_phase.gguf_header import read_header
from llama_phase.partial_file import commit, need_space, partial_file

from .metadata import FLAGS_KEY, add_metadata
from .spec import ModelSpec
from .tensors import TensorList
from .vocabulary import Vocabulary

HEADER_BYTES = 32 << 20  # room for the largest vocabulary

OnBytes = Callable[[int, str], None]


def is_made(path: Path, spec: ModelSpec) -> bool:
    """Whether ``path`` is this very model, complete.

    Raises UsageError if the file was not made here, since making the model would destroy it.
    """
    if not path.exists():
        return False
    try:
        header = read_header(path)
    except ModelError as error:
        raise _foreign(path) from error
    if FLAGS_KEY not in header.metadata:
        raise _foreign(path)
    return header.metadata[FLAGS_KEY] == spec.flags() and header.file_bytes >= header.needed_bytes


def _foreign(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists and is no model made by synth_gguf", fix="name another output, or delete it first"
    )


def write_model(
    plan: TensorList, vocabulary: Vocabulary, path: Path, on_bytes: OnBytes = lambda n_bytes, tensor: None
) -> bool:
    """Write the model to ``path`` unless another process did meanwhile; return whether it was written here.

    ``on_bytes(n_bytes, tensor)`` is called after each chunk. Raises MissingPrerequisite if the disk is too small,
    ModelError if the place is not writable. Nothing is left behind then, nor after KeyboardInterrupt.
    """
    with partial_file(path) as part:
        if is_made(path, plan.spec):
            return False
        need_space(path, HEADER_BYTES + sum(t.n_bytes for t in plan.tensors))
        _write(plan, vocabulary, part, on_bytes)
        commit(part, path)
    return True


def write_shape(plan: TensorList, vocabulary: Vocabulary, path: Path) -> None:
    """The model with a hole for weights, which takes no disk: for a program that reads none.

    It passes for the model, so ``path`` is a place that is deleted again.
    """
    _write(plan, vocabulary, path, lambda n_bytes, tensor: None, weights=False)


def _write(plan: TensorList, vocabulary: Vocabulary, part: Path, on_bytes: OnBytes, weights: bool = True) -> None:
    w = gguf.GGUFWriter(part, plan.spec.arch)
    try:
        add_metadata(w, plan.spec, vocabulary)
        for t in plan.tensors:
            w.add_tensor_info(t.name, t.shape[::-1], np.float32, t.n_bytes, raw_dtype=t.type)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        file = w.fout[0]
        w.write_padding(file, file.tell())
        if not weights:
            padded = (w.ggml_pad(t.n_bytes, w.data_alignment) for t in plan.tensors)
            file.truncate(file.tell() + sum(padded))
            return
        for t in plan.tensors:
            written = 0
            for chunk in t.chunks():
                file.write(memoryview(chunk).cast("B"))
                written += chunk.nbytes
                on_bytes(chunk.nbytes, t.name)
            if written != t.n_bytes:
                raise AssertionError(f"{t.name}: {written} bytes for {t.shape} {t.type.name}, expected {t.n_bytes}")
            w.write_padding(file, written)
    finally:
        w.close()
