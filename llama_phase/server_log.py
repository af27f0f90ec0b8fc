"""The log file of a server: the child writes it by itself, we only read. No pipe that could fill up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from llama_phase.errors import LlamaPhaseError

KEEP_LOGS = 20
SCAN_BYTES = 16 << 20  # how far back a dead server's log is searched for its reason
_RELEVANT = re.compile(
    r"(?i:error|fail|LLAMA_PHASE|abort|assert|invalid|couldn't|cannot|unable|terminate called|out of memory|exception)"
    r"|\d E "  # llama.cpp's own level mark: `0.00.065.041 E srv ...`
)


def open_log(folder: Path, port: int) -> tuple[Path, int]:
    """Create a new log file, readable by this user only: (path, file descriptor open for appending).

    The newest KEEP_LOGS files by name stay, those of other supervisors that live, and, since the clock in the names may
    be set back, this one and those that a server writes to: they are locked as long as it has them open. Raises
    LlamaPhaseError when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path, fd = _create(folder, f"port{port}-{os.getpid()}")
    except OSError as error:
        raise LlamaPhaseError(
            f"cannot write a log in {folder}: {error.strerror}",
            fix="free or allow it, or name another folder with LLAMA_PHASE_STATE_DIR",
        ) from None
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH)  # of the open file, which the server inherits
    for old in sorted(folder.glob("*-port*.log"))[:-KEEP_LOGS]:
        owner = old.stem.rpartition("-")[2]
        if old != path and (owner == str(os.getpid()) or not Path(f"/proc/{owner}").exists()) and not _in_use(old):
            old.unlink(missing_ok=True)
    return path, fd


def _in_use(path: Path) -> bool:
    """Whether a server still writes to this log."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _create(folder: Path, name: str) -> tuple[Path, int]:
    """A file of its own for each server: two of one second must not be taken for one."""
    while True:
        now_ns = time.time_ns()
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ns // 10**9))
        path = folder / f"{moment}.{now_ns // 10**6 % 1000:03}-{name}.log"
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        time.sleep(0.001)


def relevant_lines(lines: Iterable[str], limit: int = 8) -> list[str]:
    """The last lines that say what went wrong; the last lines of any kind when none does."""
    relevant: deque[str] = deque(maxlen=limit)
    last: deque[str] = deque(maxlen=limit)
    for line in lines:
        line = line.rstrip()
        if not line:
            continue
        last.append(line)
        if _RELEVANT.search(line):
            relevant.append(line)
    return list(relevant or last)


def read_tail(path: Path, size: int = SCAN_BYTES) -> list[str]:
    """The lines in the last `size` bytes of a log; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read(size).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines


def size_bytes(path: Path) -> int:
    """Size of a log, 0 when it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class LogTail:
    """Follows a growing log: ``read`` returns the whole lines that came since the last call."""

    def __init__(self, path: Path):
        self.path = path
        self.position = 0
        self._rest = b""

    def read(self, at_most: int = 1 << 20) -> list[str]:
        """New complete lines. Of a flood only the last `at_most` bytes are looked at, so that reading keeps up."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                if end - self.position > at_most:
                    self.position, self._rest = end - at_most, b""
                file.seek(self.position)
                data = file.read(at_most)
        except OSError:
            return []
        self.position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]
