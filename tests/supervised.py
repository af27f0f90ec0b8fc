"""A supervisor in a thread of the test's process, with signals that a test sends by setting a flag."""

from __future__ import annotations

import threading

from fake_world import World, until

from llama_phase.companions import companions_for
from llama_phase.errors import LlamaPhaseError
from llama_phase.instance import folder_of
from llama_phase.lifecycle_terms import Policy
from llama_phase.settings import Settings
from llama_phase.supervisor import Supervisor
from llama_phase.supervisor_status import SupervisorStatus, read_status

# flags of the real server with the smallest model
SMALL = ("-t", "1", "-tb", "1", "-np", "1", "-ngl", "0", "--no-warmup", "--no-ui")


class Asked:
    """What signals would ask for."""

    first = None

    def __init__(self) -> None:
        self.stop = self.hurry = False
        self.change: str | None = None

    def asked(self) -> bool:
        return self.stop

    def asked_twice(self) -> bool:
        return self.hurry

    def change_asked(self) -> str | None:
        wanted, self.change = self.change, None
        return wanted


class Run:
    """A supervisor in a thread."""

    def __init__(self, world: World, *, upstream: tuple[str, ...] = (), policy: dict | None = None, **options: object):
        self.settings = Settings.load(**{"model": world.model, "port": 0, "grace_s": 5} | options, upstream=upstream)
        self.folder = folder_of(self.settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.signals, self.said = Asked(), []
        rules = Policy(**{"restarts": 2, "delay_s": 0.05, "settled_s": 0.2} | (policy or {}))
        self.supervisor = Supervisor(self.settings, self.folder, policy=rules, say=self.said.append)
        self.supervisor.companions = companions_for(self.settings, self.supervisor.status, self.supervisor.note)
        self.thread = threading.Thread(target=lambda: self.supervisor.run(self.signals), daemon=True)
        self.thread.start()

    @property
    def status(self) -> SupervisorStatus:
        return read_status(self.folder) or SupervisorStatus()

    def until_state(self, *states: str) -> SupervisorStatus:
        until(lambda: self.status.state in states, f"{states}; it is {self.status.state}: {self.said}")
        return self.status

    def until_over(self) -> LlamaPhaseError | None:
        until(lambda: not self.thread.is_alive(), f"the supervisor ended: {self.said}")
        return self.supervisor.error

    def close(self) -> None:
        self.signals.stop = self.signals.hurry = True
        self.thread.join(30)
        assert not self.thread.is_alive()
