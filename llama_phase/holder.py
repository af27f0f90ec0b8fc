"""One supervisor per folder and per address: locks that the kernel gives back, whatever ends their holder.

The folder's lock is a file lock; the file says who holds it. An address's lock is a socket with a name outside the file
system: other folders cannot see the first one, and the port itself is free for a moment at each restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from llama_phase.errors import AlreadyRunning, LlamaPhaseError, PortBusy
from llama_phase.running_servers import birth_of, same_process

FILE_NAME = "lock"
READERS_GO = 25  # attempts
ROOM_BYTES = 1024  # the file has this size from the start: on a full disk it can still be written over


@dataclass(frozen=True)
class Holder:
    """A supervisor: its process by pid and birth (see running_servers.birth_of), and what it serves. `unwritten`: why
    it cannot write its status; empty while it can."""

    pid: int
    birth_s: float | None
    model: str = ""
    port: int = 0
    unwritten: str = ""

    @property
    def alive(self) -> bool:
        return same_process(self.pid, self.birth_s)

    @property
    def age_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (self.birth_s or 0.0)


def read_holder(folder: Path) -> Holder | None:
    """The living supervisor of `folder`, None when there is none: the file alone proves nothing, the lock does.

    Raises LlamaPhaseError when that cannot be told.
    """
    path = folder / FILE_NAME
    try:
        for _ in range(READERS_GO):
            with path.open("rb") as file:
                holder = _parse(file.read())
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None
                except BlockingIOError:
                    if holder is not None:
                        return holder if holder.alive else None
            time.sleep(0.02)  # who took it is about to write who it is
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise may_not_read(path, error) from None
    raise LlamaPhaseError(f"a process holds {path}, which does not say who", fix=f"`fuser {path}` names it")


def may_not_read(path: Path, error: OSError) -> LlamaPhaseError:
    """The error for what a supervisor keeps and this user cannot look at: that it is not there would be a guess."""
    return LlamaPhaseError(f"may not read {path}: {error.strerror}", fix="ask as the user who started the supervisor")


def _parse(content: bytes) -> Holder | None:
    try:
        known = {item.name for item in fields(Holder)}
        return Holder(**{key: value for key, value in json.loads(content).items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None


class Lock:
    """Holds a folder and addresses from `take` until `release` or the end of the process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._fd: int | None = None
        self._holder: Holder | None = None
        self._sockets: list[socket.socket] = []

    def take(self, model: str, hosts: Iterable[str], port: int) -> None:
        """Raises AlreadyRunning, PortBusy (port 0 is never busy), or LlamaPhaseError when the folder is not ours."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(self.folder / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        try:
            if not self._lock_folder(self._fd):
                raise _already_running(self.folder, read_holder(self.folder))
            for host in hosts if port else ():
                self._sockets.append(_lock_address(host, port))
            self._write(Holder(os.getpid(), birth_of(os.getpid()), model, port))
        except OSError as error:
            self.release()
            raise _cannot_write(self.folder, error) from None
        except BaseException:
            self.release()
            raise

    def mark(self, unwritten: str) -> None:
        """Let readers know why the status cannot be written, or that it can be again. Only tried."""
        if self._holder is not None:
            with contextlib.suppress(OSError):
                self._write(replace(self._holder, unwritten=unwritten))

    def _write(self, holder: Holder) -> None:
        assert self._fd is not None
        text = json.dumps(asdict(holder)).encode().ljust(ROOM_BYTES)
        os.pwrite(self._fd, text, 0)  # over what is there: what is cut off first may not be had again
        os.ftruncate(self._fd, len(text))
        self._holder = holder

    def _lock_folder(self, fd: int) -> bool:
        """Whether it was free. Whoever reads the holder locks the file as well, for a moment."""
        for _ in range(READERS_GO):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if read_holder(self.folder) is not None:
                    return False
                time.sleep(0.02)
        return False

    def release(self) -> None:
        """Give everything back. Idempotent."""
        for item in self._sockets:
            item.close()
        self._sockets.clear()
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)  # the file stays: removing it would let two take two files of one name
            self._fd = self._holder = None


def _cannot_write(folder: Path, error: OSError) -> LlamaPhaseError:
    return LlamaPhaseError(
        f"cannot write in {folder}: {error.strerror}",
        fix="free or allow it, or name another folder with LLAMA_PHASE_STATE_DIR",
    )


def _already_running(folder: Path, holder: Holder | None) -> AlreadyRunning:
    who = "another process"
    if holder:
        who = f"pid {holder.pid}, serving {holder.model}" + (f" on port {holder.port}" if holder.port else "")
    return AlreadyRunning(
        f"a supervisor already runs in {folder}: {who}",
        fix="stop it with `llama-phase down`, or give this one its own LLAMA_PHASE_STATE_DIR",
    )


def _lock_address(host: str, port: int) -> socket.socket:
    name = f"\0llama-phase {host} {port}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(8)
        return lock
    except OSError:
        lock.close()
    raise PortBusy(
        f"port {port} on {host} is kept by the supervisor with pid {_holder_of(name)}",
        fix="stop it with `llama-phase down`, or choose another port: --port N (0: any free one)",
    )


def _holder_of(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.settimeout(1.0)
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return str(struct.unpack("3i", credentials)[0])
        except OSError:
            return "unknown"
