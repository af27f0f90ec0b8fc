"""A record of running servers, so that one whose supervisor was killed is found and ended at the next start.

A server dies with its supervisor (see server.py); this is for what still survived. A pid alone proves nothing, since
pids are used again: a process is ours only when its birth time is the recorded one, and it is an orphan only when
its supervisor, by pid and birth time, is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil


def birth_of(pid: int) -> float | None:
    """Start time of a live process in seconds since the epoch, None when there is none (a zombie is none)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def same_process(pid: int, birth: float | None) -> bool:
    """Whether `pid` is still the process that started at `birth` (kernel clock ticks: 10 ms)."""
    now = birth_of(pid)
    return now is not None and birth is not None and abs(now - birth) < 0.02


def write_record(folder: Path, pid: int) -> Path | None:
    """Record server `pid` as owned by this process. None when the folder cannot be written: only reaping is lost."""
    path = folder / f"{pid}.json"
    record = {"pid": pid, "birth": birth_of(pid), "owner": os.getpid(), "owner_birth": birth_of(os.getpid())}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        return None
    return path


def reap_orphans(folder: Path) -> list[int]:
    """Kill recorded servers whose supervisor is gone, drop stale records; the pids killed."""
    killed = []
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            pid, birth = int(record["pid"]), record["birth"]
            owner, owner_birth = int(record["owner"]), record["owner_birth"]
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if same_process(owner, owner_birth):
            continue
        if same_process(pid, birth):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # every server leads a group of its own
                killed.append(pid)
        path.unlink(missing_ok=True)
    return killed
