"""A record of running servers, so that one whose supervisor was killed is found and ended at the next start.

A server dies with its supervisor (see server.py); this is for what still survived. A pid alone proves nothing, since
pids are used again: a process is ours only when its birth time is the recorded one, and it is an orphan only when
its supervisor, by pid and birth time, is gone.

A program between us and the server (a script that does not `exec` it) may be gone while the server lives on in its
group. The kernel gives a pid to nobody else as long as a group or session has it as its number, but a later group may
have got it. So a group without its leader is ours only when one of it still writes to the file that the recorded
process was given: an open file's inode is not used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from pathlib import Path

GONE_WITHIN_S = 10.0  # after SIGKILL: much memory takes a while to be given back
LOOK_S = 0.02


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
    record |= {"boot": boot_id(), "output": _outputs(pid)}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        return None
    return path


def group_of(leader: int) -> list[int]:
    """The living processes of the group that `leader` began in a session of its own, whether or not it lives itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == os.getsid(pid) == leader and birth_of(pid) is not None:
                found.append(pid)
    return found


def _outputs(pid: int) -> list[list[int]]:
    """Device and inode of the regular files that are its standard output and error."""
    found = []
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/{pid}/fd/{fd}")
            if stat.S_ISREG(about.st_mode):
                found.append([about.st_dev, about.st_ino])
    return found


def _survives(pid: int, birth: float | None, output: list[list[int]]) -> bool:
    """Whether the group that the recorded process led has anybody left."""
    if same_process(pid, birth):
        return os.getpgid(pid) == pid  # every server leads a group of its own
    if birth_of(pid) is not None:
        return False  # the number is another's now
    return any(item in output for member in group_of(pid) for item in _outputs(member))


def _kill_group(leader: int) -> None:
    """SIGKILL; returns when nobody of it is left, so that the port is free."""
    os.killpg(leader, signal.SIGKILL)
    end_s = time.monotonic() + GONE_WITHIN_S
    while group_of(leader) and time.monotonic() < end_s:
        time.sleep(LOOK_S)


def reap_orphans(folder: Path) -> list[int]:
    """Kill recorded servers whose supervisor is gone, with all of their group, and drop stale records; the pids
    recorded. Returns when they are gone."""
    killed = []
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            pid, birth = int(record["pid"]), record["birth"]
            owner, owner_birth = int(record["owner"]), record["owner_birth"]
            another_boot = record.get("boot", boot_id()) != boot_id()
            output = list(record.get("output", []))
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if same_process(owner, owner_birth) and not another_boot:
            continue
        with contextlib.suppress(OSError):
            if not another_boot and _survives(pid, birth, output):
                _kill_group(pid)
                killed.append(pid)
        path.unlink(missing_ok=True)
    return killed
