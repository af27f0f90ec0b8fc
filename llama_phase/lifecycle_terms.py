"""The words of the state machine: its states and rules, the events it is told, the actions it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llama_phase.configuration import Configuration
from llama_phase.supervisor_status import Failure


class State(str, Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True)
class Policy:
    """`restarts`: in a row, 0 for none. `settled_s`: ready for so long counts as having served."""

    restarts: int = 5
    rollback: bool = True
    delay_s: float = 1.0
    delay_cap_s: float = 60.0
    settled_s: float = 30.0
    stable_s: float = 600.0


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartAsked:
    pass


@dataclass(frozen=True)
class Spawned:
    """There is a process. `pid` and `birth_s` name it for certain."""

    pid: int
    birth_s: float | None = None
    log: str = ""
    url: str = ""


@dataclass(frozen=True)
class Loaded:
    """It says it is healthy."""


@dataclass(frozen=True)
class Proved:
    """A real prompt went through and a token came back. `probe_s` None: nothing to prove for this kind of server."""

    probe_s: float | None = None


@dataclass(frozen=True)
class Served:
    """A client's request was answered."""


@dataclass(frozen=True)
class Ended:
    """The process is gone without being asked, or there never was one. Nothing of it is left."""

    failure: Failure


@dataclass(frozen=True)
class StopAsked:
    pass


@dataclass(frozen=True)
class ChangeAsked:
    """By hand: serve another configuration from now on."""

    configuration: Configuration


@dataclass(frozen=True)
class Gone:
    """A process that was stopped on request is gone."""


Event = StartAsked | Spawned | Loaded | Proved | Served | Ended | StopAsked | ChangeAsked | Gone


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start a server; answer with Spawned or Ended."""

    configuration: Configuration


@dataclass(frozen=True)
class Stop:
    """Drain and stop the server; answer with Gone."""


@dataclass(frozen=True)
class NoteServed:
    configuration: Configuration


@dataclass(frozen=True)
class NoteFailed:
    """It had served before and was given up now."""

    configuration: Configuration
    failure: Failure


@dataclass(frozen=True)
class Say:
    """A sentence for the log and the terminal."""

    text: str


Action = Start | Stop | NoteServed | NoteFailed | Say
