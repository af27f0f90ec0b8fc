"""Signs of life of a process, and for how long there was none. Pure: fed with times and what was seen."""

from __future__ import annotations

from typing import NamedTuple


class Vitals(NamedTuple):
    """What shows that a process is alive: totals since its start, and its resident memory now."""

    log_bytes: int = 0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    read_bytes: int = 0


class StallWatch:
    """Seconds since a sign of life.

    Our own /health requests cost the server a little processor time and memory, so those two count only beyond what
    they can explain.
    """

    def __init__(self, now_s: float):
        self._seen = Vitals()
        self._seen_s = self._alive_s = now_s

    def idle_s(self, now_s: float, vitals: Vitals) -> float:
        before, passed_s = self._seen, now_s - self._seen_s
        alive = (
            vitals.log_bytes != before.log_bytes
            or vitals.read_bytes != before.read_bytes
            or abs(vitals.rss_bytes - before.rss_bytes) >= 1 << 20
            or vitals.cpu_s - before.cpu_s > 0.05 * passed_s
        )
        self._seen, self._seen_s = vitals, now_s
        if alive:
            self._alive_s = now_s
        return now_s - self._alive_s
