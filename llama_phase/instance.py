"""Where a supervisor keeps its files, and how another process talks to it.

<state folder>/            named by LLAMA_PHASE_STATE_DIR: one supervisor; else one per port in port-<n>/
  lock status.json         who holds it, what it says of itself
  served/                  the journal of configurations that served
  request                  what `llama-phase rollback` wants, announced by SIGUSR1
  supervisor.log           what a detached supervisor says
  hang-*.json              what hanging servers were doing
  log/ running/            logs and records of servers, in the state folder itself
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from llama_phase.errors import LlamaPhaseError, UsageError
from llama_phase.holder import Holder, may_not_read, read_holder
from llama_phase.tree import write_atomically

if TYPE_CHECKING:
    from llama_phase.lifecycle_terms import Policy
    from llama_phase.settings import Settings

CHANGE_SIGNAL = signal.SIGUSR1
NOW_SIGNAL = signal.SIGUSR2  # stop at once
REQUEST = "request"
SUPERVISOR_LOG = "supervisor.log"


def folder_of(settings: Settings) -> Path:
    """The supervisor's own folder for these settings."""
    if settings.state_dir is not None:
        return settings.state_path
    return settings.state_path / f"port-{settings.port or 'any'}"


def policy_of(settings: Settings) -> Policy:
    """The restart rules these settings ask for."""
    from llama_phase.lifecycle_terms import Policy

    return Policy(restarts=settings.restarts, rollback=settings.rollback)


def find_folder(state: Path, explicit: bool, port: int | None) -> Path | None:
    """The folder of the supervisor that a command without a model means: the one of `port` if given, else the only one
    that runs, else the last one that did; None when there never was one. Raises UsageError when several run,
    LlamaPhaseError when that cannot be told.
    """
    if explicit:
        folders = [state]
    elif port is not None:
        folders = [state / f"port-{port or 'any'}"]
    else:
        folders = sorted(state / name for name in _names(state) if name.startswith("port-"))
    known = [folder for folder in folders if "status.json" in _names(folder) or read_holder(folder)]
    running = [folder for folder in known if read_holder(folder)]
    if len(running) > 1:
        ports = [folder.name.removeprefix("port-") for folder in running]
        free = " (any: --port 0)" if "any" in ports else ""
        raise UsageError(f"several supervisors run, on ports {', '.join(ports)}", fix=f"say which: --port N{free}")
    if not known:
        return None
    return running[0] if running else max(known, key=lambda folder: (folder / "status.json").stat().st_mtime)


def _names(folder: Path) -> list[str]:
    """What is in a folder: nothing if it is not there. A folder that may not be read is no empty one."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise may_not_read(folder, error) from None


def signal_holder(holder: Holder, number: signal.Signals) -> bool:
    """Signal a supervisor, and only it: nothing is sent when pid and birth time do not both fit. Whether it was sent.

    The pid's file descriptor is opened before the check, so that the number cannot be given to another process between
    check and signal (where the kernel has none: that moment is left).
    """
    fd = None
    try:
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(holder.pid)
        if not holder.alive:
            return False
        if fd is None:
            os.kill(holder.pid, number)
        else:
            signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


def put_request(folder: Path, fingerprint: str) -> None:
    """Leave what the supervisor shall change to. Raises LlamaPhaseError when it cannot be written."""
    try:
        write_atomically(folder / REQUEST, fingerprint.encode(), mode=0o600)
    except OSError as error:
        raise LlamaPhaseError(
            f"cannot write {folder / REQUEST}: {error.strerror}", fix="free or allow it, and try again"
        ) from None


def take_request(folder: Path) -> str | None:
    """Take what was left, None when there is nothing."""
    path = folder / REQUEST
    try:
        text = path.read_text(encoding="utf-8").strip()
        path.unlink()
    except (OSError, ValueError):
        return None
    return text or None
