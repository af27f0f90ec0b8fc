"""Answers as they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Step = tuple[int, float]
Likeliest = dict[int, float]


def scored(steps: Iterable[dict[str, Any]]) -> list[Step]:
    """Token and log-probability of each step, of what the server's `n_probs` gives."""
    return [(step["id"], step["logprob"]) for step in steps]


def likeliest(steps: Iterable[dict[str, Any]]) -> list[Likeliest]:
    """The tokens that were likeliest at each step, by descending log-probability: of greedy answers the first is the
    answer's. More sensitive than its log-probability alone, which is 0 for a token that is certain."""
    return [{top["id"]: top["logprob"] for top in step["top_logprobs"]} for step in steps]


def first_other(expected: Sequence[Likeliest], got: Sequence[Likeliest]) -> str:
    """The first step that is not the same bit for bit; empty when all are."""
    if len(expected) != len(got):
        return f"{len(expected)} and {len(got)} tokens"
    for step, (a, b) in enumerate(zip(expected, got, strict=True)):
        if list(a.items()) != list(b.items()):
            return f"token {step}: {list(a.items())[:2]} and {list(b.items())[:2]}"
    return ""


def ties(
    tokens: Sequence[int], reference: list[Likeliest], after: Callable[[Sequence[int], int], list[Likeliest]]
) -> Iterator[float]:
    """By how much, in log-probability, the reference's token is likelier than the one in its place, wherever they
    differ. Behind such a place the rest is compared with what the reference says `after` these tokens, in so many."""
    begin = 0
    for position, token in enumerate(tokens):
        top = reference[position - begin]
        best = next(iter(top))
        if token == best:
            continue
        yield top[best] - top.get(token, -math.inf)
        begin = position + 1
        if begin < len(tokens):
            reference = after(tokens[:begin], len(tokens) - begin)
