"""Decides from signs of life whether a server hangs. Pure: fed with times and what was seen.

Loading: any sign counts, as in `StallWatch`. Serving: progress is a token, a piece of a prompt, a log line, or an
answer that says all slots are idle. Processor time alone is a weak sign: a thread that waits for a GPU in a loop uses
it as well as one that computes a micro-batch for minutes. So with it the limit is WEAK times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_phase.stall_watch import StallWatch, Vitals

WEAK = 4


@dataclass(frozen=True)
class Beat:
    """What the server last answered about its slots. `answers` counts answers; `busy` None: it does not say."""

    answers: int = 0
    busy: bool | None = None
    progress: tuple[int, ...] = ()


def beat_of(slots: list[dict[str, Any]], answers: int) -> Beat:
    """The beat in an answer of GET /slots."""
    progress = []
    for slot in slots:
        nexts = slot.get("next_token") or [{}]
        first = nexts[0] if isinstance(nexts, list) else nexts
        progress += [
            int(slot.get("id_task") or 0),
            int(slot.get("n_prompt_tokens_processed") or 0),
            int(first.get("n_decoded") or 0),
        ]
    return Beat(answers, any(slot.get("is_processing") for slot in slots), tuple(progress))


class HangWatch:
    """One server after it was loaded."""

    def __init__(self, now_s: float, limit_s: float):
        self.limit_s = limit_s
        self._weak = StallWatch(now_s)
        self._beat = Beat()
        self._log_bytes = -1
        self._moved_s = now_s

    def stuck_s(self, now_s: float, vitals: Vitals, beat: Beat) -> float | None:
        """Seconds without progress if that is too long, else None."""
        answered = beat.answers != self._beat.answers
        idle = answered and not beat.busy  # not known: left alone
        if idle or vitals.log_bytes != self._log_bytes or (answered and beat.progress != self._beat.progress):
            self._moved_s = now_s
        self._beat, self._log_bytes = beat, vitals.log_bytes
        still_s = self._weak.idle_s(now_s, vitals)
        without_s = now_s - self._moved_s
        limit_s = self.limit_s if still_s >= self.limit_s else WEAK * self.limit_s
        return without_s if without_s >= limit_s else None
