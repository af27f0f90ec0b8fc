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


def birth_of(pid: int) -> float | None:
    """Start time of a live process, None when there is none (a zombie is none).

    In seconds since the machine started: unlike a time of day it does not move when somebody sets the clock.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before may hold anything
        return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def same_process(pid: int, birth: float | None) -> bool:
    """Whether `pid` is still the process that started at `birth` (kernel clock ticks: 10 ms)."""
    now = birth_of(pid)
    return now is not None and birth is not None and abs(now - birth) < 0.005


def boot_id() -> str:
    """Different after each start of the machine; empty where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_record(folder: Path, pid: int) -> Path | None:
    """Record server `pid` as owned by this process. None when the folder cannot be written: only reaping is lost."""
    path = folder / f"{pid}.json"
    record = {"pid": pid, "birth": birth_of(pid), "owner": os.getpid(), "owner_birth": birth_of(os.getpid())}
    record["boot"] = boot_id()
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
            another_boot = record.get("boot", boot_id()) != boot_id()
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if same_process(owner, owner_birth) and not another_boot:
            continue
        if same_process(pid, birth) and not another_boot:
            with contextlib.suppress(OSError):
                if os.getpgid(pid) == pid:  # every server leads a group of its own
                    os.killpg(pid, signal.SIGKILL)
                    killed.append(pid)
        path.unlink(missing_ok=True)
    return killed
