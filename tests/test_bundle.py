"""What goes into the archive for machines without network."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bundle
import pytest

from llama_phase.source import LOCK

ROOT = Path(__file__).resolve().parent.parent


def test_the_whole_checkout_is_in_it() -> None:
    """Its tests run there: what they read has to be there."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    command = ["git", "-C", str(ROOT), "ls-files"]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {name.partition("/")[0] for name in files} - {".gitignore", LOCK} == set(bundle.OWN)


def test_what_is_taken_of_the_source() -> None:
    assert bundle.makes_models("gguf-py/gguf/gguf_writer.py") and bundle.makes_models("models/ggml-vocab-qwen35.gguf")
    assert not bundle.makes_models("gguf-py/tests/test_metadata.py")
    assert bundle.kept("src/llama.cpp") and not bundle.kept("ggml/src/ggml-vulkan/ggml-vulkan.cpp")
