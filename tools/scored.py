"""Answers as they are compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def scored(steps: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """Token and log-probability of each step, of what the server's `n_probs` gives."""
    return [(step["id"], step["logprob"]) for step in steps]
