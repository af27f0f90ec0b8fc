"""The probe that tells roundings from mistakes of chunks: it believes the first and names the second."""

from __future__ import annotations

import subprocess
import sys

import pytest
from engine_server import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def probe(model, change: str) -> subprocess.CompletedProcess[str]:
    options = ["--tokens", "400", "--ubatch", "256", "--chunk", "64", "--change", change]
    command = [sys.executable, "tools/first_difference.py", "--backend", "cpu", "--model", str(model), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("noise=ffn_moe_gate:3e-4", 0, "ffn_moe_gate-0"),
        ("corrupt=flash_attn:64", 4, "NOT EXPLAINED: flash_attn-"),
        ("corrupt=indexer_top_k:390", 4, "NOT EXPLAINED: a change of selected ids that is no near tie"),
    ],
)
def test_roundings_and_mistakes(engine, model_path, change: str, code: int, said: str) -> None:
    """Noise that only chunks have, a row that is another token's, and rows that were chosen for another token."""
    done = probe(model_path("qwen4exp-exact"), change)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert "chunks of 64" in done.stdout.split(said)[0]
    assert "reference with and without callback: last 0.00000 median 0.00000" in done.stdout
