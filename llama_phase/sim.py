"""How often would the slots have had the expert? Replays routing traces through the engine's own slot policy.

A trace is a sequence of (layer, ids): the experts that one decode batch chose in one layer, in the order of its tokens.
It comes from a file, from `Engine(..., trace_routing=True)`, or is made up by `synthetic_trace`. What is copied ahead
(LLAMA_PHASE_PREFETCH) is not in it: the figures are those without.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_phase.engine_library import native
from llama_phase.errors import UsageError

Step = tuple[int, list[int]]
Trace = Sequence[Step]


@dataclass(frozen=True)
class Replay:
    """What a trace costs with `n_slots` per layer: ids looked up, experts copied, copies that evicted another one."""

    n_slots: int
    looked_up: int
    missed: int
    evicted: int

    @property
    def hit_rate(self) -> float:
        """Share of the ids that needed no copy; 0 for an empty trace."""
        return (self.looked_up - self.missed) / self.looked_up if self.looked_up else 0.0


def replay(trace: Trace, n_expert: int, n_slots: int, *, warm: dict[int, list[int]] | None = None) -> Replay:
    """Replay on empty slots, or on those that hold `warm` (experts by layer, the least recently used first).

    Raises ValueError when an id is not in 0 .. n_expert-1, or when a batch needs more than `n_slots`.
    """
    layers: dict[int, list[list[int]]] = defaultdict(list)
    for layer, ids in trace:
        layers[layer].append(ids)
    looked_up = missed = evicted = 0
    for layer, steps in layers.items():
        policy = native().SlotPolicy(n_expert, n_slots)
        if warm and layer in warm:
            policy.fill(warm[layer])
        policy.replay(steps)
        looked_up, missed, evicted = looked_up + policy.looked_up, missed + policy.missed, evicted + policy.evicted
    return Replay(n_slots, looked_up, missed, evicted)


def sweep(trace: Trace, n_expert: int, slots: Iterable[int]) -> list[Replay]:
    """One replay per number of slots."""
    return [replay(trace, n_expert, n) for n in slots]


def from_routing(routing: Iterable[tuple[int, list[list[int]]]], *, batch: int = 1) -> list[Step]:
    """A trace of what Engine.take_routing gave: micro-batches of at most `batch` tokens, the ones that use slots."""
    return [(layer, [i for token in tokens for i in token]) for layer, tokens in routing if len(tokens) <= batch]


def synthetic_trace(
    n_tokens: int, n_layers: int, n_expert: int, n_used: int, *, skew: float = 1.0, repeat: float = 0.3, seed: int = 0
) -> list[Step]:
    """A made-up trace of single tokens: popularity of experts falls as rank^-`skew`, in another order per layer, and a
    token keeps each expert of the one before with probability `repeat`."""
    if not 1 <= n_used <= n_expert:
        raise UsageError(f"{n_used} of {n_expert} experts cannot be used", fix="use at least 1, at most all")
    source = random.Random(seed)
    weights = [(rank + 1) ** -skew for rank in range(n_expert)]
    orders = [source.sample(range(n_expert), n_expert) for _ in range(n_layers)]
    last: list[list[int]] = [[] for _ in range(n_layers)]
    trace = []
    for _ in range(n_tokens):
        for layer, order in enumerate(orders):
            ids = [i for i in last[layer] if source.random() < repeat]
            while len(ids) < n_used:
                drawn = order[source.choices(range(n_expert), weights)[0]]
                if drawn not in ids:
                    ids.append(drawn)
            last[layer] = ids
            trace.append((layer, ids))
    return trace


def save_trace(trace: Trace, path: Path) -> None:
    """One JSON object a line: {"layer": 3, "ids": [7, 12]}."""
    path.write_text("".join(json.dumps({"layer": layer, "ids": list(ids)}) + "\n" for layer, ids in trace))


def load_trace(path: Path) -> list[Step]:
    """Raises UsageError with the line that is not a step."""
    trace: list[Step] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            step = json.loads(line)
            trace.append((int(step["layer"]), [int(i) for i in step["ids"]]))
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{path}:{number} is not a step of a trace", fix='each line is like {"layer": 3, "ids": [7, 12]}'
            ) from None
    return trace
