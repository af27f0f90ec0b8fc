"""What speculation wins at a known acceptance: no draft, fixed draft lengths and the chosen length, on the same slots.

llama-server's --spec-synth-rates accepts drafted tokens at random instead of by match, each position with the same
probability once those before it were accepted. The text is then meaningless, the work is the real one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from llama_phase.bench import HOST_EXPERTS, Configuration, median

OFF, AUTO = "off", "auto"
LENGTHS = (1, 2, 3, 5, 7)
LONGEST = 7  # EXPERT_BATCH - 1
TEXTS = ("decode", "prose")
KINDS = ("verify_ms", "draft_ms")


def rates_of(text: str) -> list[float]:
    """`0.5,0.9` as numbers. Raises ValueError."""
    return [float(part) for part in text.split(",") if part.strip()]


def synthetic(rate: float, length: int) -> tuple[str, ...]:
    """Flags for drafts of at most `length` tokens that are accepted one after the other with probability `rate`."""
    rates = ",".join(f"{rate ** (i + 1):.9g}" for i in range(length))
    return ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(length), "--spec-synth-rates", rates)


def speculation_suite(threads: int, slots: str, acceptances: Sequence[float]) -> list[Configuration]:
    """Names are `off` and `RATE LENGTH`."""
    more = (*HOST_EXPERTS, "-np", "1", "-t", str(threads), "--no-warmup")
    settings = {"prefill_mode": "transaction", "ctx": 16384, "ubatch": 512, "expert_slots": slots}
    suite = [Configuration(OFF, settings, more)]
    for rate in acceptances:
        for length in LENGTHS:
            suite.append(Configuration(f"{rate:g} {length}", settings, (*more, *synthetic(rate, length))))
        chosen = {**settings, "draft": AUTO}
        suite.append(Configuration(f"{rate:g} {AUTO}", chosen, (*more, *synthetic(rate, LONGEST))))
    return suite


def speculation_table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """One row a configuration; of random texts and of prose, tokens per second: seen (medians), and `at rate`, what the
    same rounds in the same time would have yielded had exactly the asked share of drafts been accepted. `x off` and
    `x best`, the best of the fixed lengths, are of these: what is drawn varies by more than lengths differ. `ms` is the
    time of a round of drafting and verifying, `reused` how many batches of target and draft found their graph,
    `lengths` the last server's rounds by chosen length; below, its times.
    """
    shown = Table(title="tokens per second by acceptance and draft length, random texts / prose")
    columns = ("acceptance", "length", "tok/s", "at rate", "x off", "x best", "ms", "accepted %", "hits %", "MiB")
    for column in (*columns, "reused %", "lengths"):
        shown.add_column(column, justify="right")
    times: list[str] = []
    speeds = {name: {kind: at_rate(name, rounds, kind) for kind in TEXTS} for name, rounds in results.items()}
    for name, rounds in results.items():
        rate, _, length = name.rpartition(" ")
        fixed = [speed for other, speed in speeds.items() if rate and other in {f"{rate} {n}" for n in LENGTHS}]
        off = [speeds[OFF]] if OFF in speeds else []
        samples = _samples(rounds, TEXTS[0])
        drafted, accepted = (sum(sample[key] for sample in samples) for key in ("drafted", "accepted"))
        hits = median(sample["hit_rate"] for sample in samples)
        state = rounds[-1]["phase"] or {}
        times += _times(name, state.get("draft", {}))
        shown.add_row(
            rate,
            length,
            " / ".join(f"{_speed(rounds, kind):.0f}" for kind in TEXTS),
            " / ".join(f"{speeds[name][kind]:.0f}" for kind in TEXTS) if rate else "",
            _over(speeds[name], off),
            _over(speeds[name], fixed if length == AUTO else []),
            f"{median(_round_ms(sample) for sample in samples) or 0:.1f}",
            f"{100 * accepted / drafted:.0f}" if drafted else "",
            f"{100 * hits:.1f}" if hits is not None else "",
            f"{median(one['memory_mib'] for one in rounds) or 0:.0f}",
            " ".join(f"{100 * one['reused'] / max(one['batches'], 1):.0f}" for one in state.get("graphs", [])),
            " ".join(map(str, state.get("draft", {}).get("rounds", []))),
        )
    shown.caption = "\n".join(times)
    return shown


def at_rate(name: str, rounds: Sequence[dict[str, Any]], kind: str) -> float:
    """Tokens per second of a configuration's texts of `kind`, with each draft accepted as often as its name says."""
    rate, _, length = name.rpartition(" ")
    tokens = seconds = 0.0
    for sample in _samples(rounds, kind):
        seconds += _seconds(sample)
        by_length = dict(enumerate(sample["draft_rounds"])) or {int(length) if rate else 0: _n_rounds(sample)}
        tokens += sum(n * sum(float(rate or 0) ** i for i in range(drafts + 1)) for drafts, n in by_length.items())
    return tokens / seconds


def _over(speed: dict[str, float], others: Sequence[dict[str, float]]) -> str:
    """How many times the fastest of `others`, by kind of text."""
    return " / ".join(f"{speed[kind] / max(other[kind] for other in others):.2f}" for kind in TEXTS) if others else ""


def _samples(rounds: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Of one kind of text."""
    return [sample for one in rounds for sample in one["samples"] if sample["kind"] == kind]


def _seconds(sample: dict[str, Any]) -> float:
    return len(sample["tokens"]) / sample["predicted_per_second"]


def _n_rounds(sample: dict[str, Any]) -> int:
    return len(sample["tokens"]) - sample["accepted"]


def _round_ms(sample: dict[str, Any]) -> float:
    return 1000 * _seconds(sample) / max(_n_rounds(sample), 1)


def _times(name: str, draft: dict[str, Any]) -> list[str]:
    """Milliseconds that the choice of lengths went by: of verify batches by tokens, of drafts by length."""
    if not draft:
        return []
    text = [f"{what} " + " ".join(f"{n}:{entry['ms']:.1f}" for n, entry in draft[what].items()) for what in KINDS]
    return [f"{name}: {'; '.join(text)}; acceptance " + " ".join(f"{rate:.2f}" for rate in draft["acceptance"])]


def _speed(rounds: list[dict[str, Any]], kind: str) -> float:
    """Median tokens per second of one kind of text."""
    return statistics.median(sample["predicted_per_second"] for sample in _samples(rounds, kind))
