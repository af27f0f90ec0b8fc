"""Sampled speculation keeps the target's distribution: chi-square over draws at a fixed context, on the accept rules
that the server uses. Seeds are fixed, so a result is the same each time; biased rules show that the test can fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from engine_server import PHASE_BIN, ROOT, clean_environment
from expert_servers import make_variant

pytestmark = pytest.mark.engine

DRAWS = 24_000
Z_ONE_IN_10_000 = 3.719  # of the normal distribution


@pytest.fixture(scope="module")
def draw(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """`draw(rule, temperature, top_k, top_p)`: what tests/accept_rule.cpp prints."""
    folder = tmp_path_factory.mktemp("accept_rule")
    model, program = make_variant("flat", folder / "flat.gguf"), folder / "accept_rule"
    source = PHASE_BIN.parents[1] / "src"
    include = [f"-I{source / part}" for part in ("include", "ggml/include", "common", "vendor")]
    link = ["-Wl,-rpath," + str(PHASE_BIN), f"-L{PHASE_BIN}", "-lllama-common", "-lllama", "-lggml", "-lggml-base"]
    command = ["g++", "-std=c++17", "-O1", "-Wall", *include, ROOT / "tests/accept_rule.cpp", "-o", program, *link]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr

    def of(rule: str, temperature: float = 1.5, top_k: int = 40, top_p: float = 0.95) -> dict:
        words = (program, model, rule, DRAWS, 5, temperature, top_k, top_p)
        done = subprocess.run([str(w) for w in words], env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return of


def excess(expected: Mapping[str, float], drawn: Mapping[str, float]) -> float:
    """Chi-square statistic over the value that a true distribution exceeds once in 10,000 times (Wilson and Hilferty's
    approximation); infinite when something was drawn that cannot be. Tokens expected less than 5 times count as one."""
    if not set(drawn) <= set(expected):
        return float("inf")
    n, total = sum(drawn.values()), sum(expected.values())
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for token, p in expected.items():
        cell = (n * p / total, drawn.get(token, 0.0))
        if cell[0] >= 5:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if rare[0] >= 5:
        cells.append((rare[0], rare[1]))
    freedom = len(cells) - 1
    assert freedom >= 2, "the context leaves nothing to choose"
    part = 2 / (9 * freedom)
    limit = freedom * (1 - part + Z_ONE_IN_10_000 * part**0.5) ** 3
    return sum((seen - mean) ** 2 / mean for mean, seen in cells) / limit


@pytest.mark.parametrize("sampling", [(1.5, 40, 0.95), (0.9, 8, 1.0), (0.7, 100, 0.8)])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_the_distribution_is_the_targets(draw: Callable[..., dict], rule: str, sampling: tuple) -> None:
    result = draw(rule, *sampling)
    assert sum(result["drawn"].values()) == DRAWS
    assert excess(result["expected"], result["drawn"]) < 1
    assert sum(result["drawn_next"].values()) > 500
    assert excess(result["expected_next"], result["drawn_next"]) < 1


@pytest.mark.parametrize("rule", ["always", "again"])
def test_a_biased_rule_fails(draw: Callable[..., dict], rule: str) -> None:
    result = draw(rule)
    possible = {token: n for token, n in result["drawn"].items() if token in result["expected"]}
    assert excess(result["expected"], possible) > 3
