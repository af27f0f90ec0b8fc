"""What a supervisor says of itself, as plain data: for `status`, metrics, the service manager and other programs.

One frozen object, replaced as a whole at every change, and written to `status.json` in the supervisor's folder, so that
a reader sees one moment or another, never half of each. Times are seconds since the epoch, births of processes seconds
since the machine started.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llama_phase.errors import LlamaPhaseError
from llama_phase.holder import may_not_read
from llama_phase.running_servers import same_process
from llama_phase.tree import write_atomically

FILE_NAME = "status.json"
OWN_ERROR = "the supervisor ended by an error of its own"  # begins the note that says so
STATES = ("stopped", "starting", "ready", "stopping", "failed")


@dataclass(frozen=True)
class Failure:
    """Why a server did not start, or ended. `kind` is one of crash.KINDS; `returncode` as of subprocess (negative: a
    signal), None when nothing was started; `deterministic`: the same configuration fails again the same way;
    `exit_code`: what the supervisor ends with if this was the last of it."""

    kind: str
    text: str
    at_s: float
    fix: str = ""
    deterministic: bool = False
    returncode: int | None = None
    was_ready: bool = False
    exit_code: int = 1
    log: str = ""
    log_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rollback:
    """A change from the configuration that failed to the last one that served (short fingerprints)."""

    failed: str
    serving: str
    reason: str
    at_s: float
    by_hand: bool = False


@dataclass(frozen=True)
class SupervisorStatus:
    """`state` is one of STATES. Waiting for the next attempt is `starting` with `restart_at_s` set. `restarts` and
    `rollbacks` count since this supervisor started; `restarts_by_reason` has the kinds of failure as keys.
    `rolled_back` is set as long as another configuration serves than the one asked for."""

    state: str = "stopped"
    since_s: float = 0.0
    supervisor_pid: int = 0
    supervisor_birth_s: float = 0.0
    server_pid: int | None = None
    server_birth_s: float | None = None
    url: str = ""
    model: str = ""
    engine: str = ""
    configuration: str = ""
    started_s: float = 0.0
    clock_offset_s: float | None = None  # times here are the monotonic clock plus this: setting the clock moves none
    load_s: float | None = None
    probe_s: float | None = None
    restarts: int = 0
    restarts_by_reason: dict[str, int] = field(default_factory=dict)
    restart_at_s: float | None = None
    rollbacks: int = 0
    rolled_back: Rollback | None = None
    failure: Failure | None = None
    log: str = ""
    notes: tuple[str, ...] = ()  # one sentence each: predictions missed, a conversation dropped
    exit_code: int | None = None  # of the supervisor, once it ended

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SupervisorStatus:
        """The inverse of `to_dict`; unknown keys are left out. Raises TypeError or ValueError for other data."""
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if values.get("failure"):
            failure = dict(values["failure"])
            values["failure"] = Failure(**failure | {"log_lines": tuple(failure.get("log_lines", ()))})
        if values.get("rolled_back"):
            values["rolled_back"] = Rollback(**values["rolled_back"])
        values["notes"] = tuple(values.get("notes", ()))
        return cls(**values)


def write_status(folder: Path, status: SupervisorStatus) -> None:
    """Replace the status file in `folder`. Raises OSError. Not synced: after a power loss there is no server."""
    content = json.dumps(status.to_dict(), indent=1) + "\n"
    write_atomically(folder / FILE_NAME, content.encode(), mode=0o600)


def read_status(folder: Path) -> SupervisorStatus | None:
    """The last status written in `folder`, None when there is none. Raises LlamaPhaseError when it cannot be read."""
    path = folder / FILE_NAME
    try:
        return SupervisorStatus.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise may_not_read(path, error) from None
    except (ValueError, TypeError, AttributeError):
        raise LlamaPhaseError(
            f"{path} is no whole status that this version can read",
            fix="`llama-phase down` stops what runs; the next start writes a new one",
        ) from None


def now_s(status: SupervisorStatus) -> float:
    """Now by the clock of the times in `status`, as long as its supervisor lives; by the machine's afterwards."""
    if status.clock_offset_s is not None and same_process(status.supervisor_pid, status.supervisor_birth_s):
        return time.monotonic() + status.clock_offset_s
    return time.time()
