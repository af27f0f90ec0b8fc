"""What goes along with a supervisor: a stand-in on the port, the service manager, metrics, conversations.

Each is told what happens and may fail without harm to what serves. All calls come from the supervisor's thread, in this
order: starting, resolved, ready, stopping, gone, and waiting in between; `status` at every change, `beat` at every
tick.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from llama_phase.errors import UsageError
from llama_phase.settings import Settings
from llama_phase.supervisor_status import SupervisorStatus, now_s
from llama_phase.upstream_flags import SLOT_SAVE_PATH, flag_value

if TYPE_CHECKING:
    from llama_phase.server import Server

SAVE_WITHIN_S = 60.0  # for conversations, before a server is stopped
_HURRY_LOOK_S = 0.1


class Companion:
    """Does nothing at all; a companion overrides what concerns it."""

    def starting(self, settings: Settings) -> None:
        """A server is about to be started and will take the port. Raises LlamaPhaseError if it must not."""

    def resolved(self, settings: Settings) -> Settings:
        """After `starting`: the settings to start it with, what was left to this machine being a number. They are
        neither journalled nor the supervisor's own."""
        return settings

    def ready(self, server: Server) -> None:
        """It is ready."""

    def stopping(self, server: Server, hurry: Callable[[], bool]) -> None:
        """A ready one that runs no request is about to be stopped."""

    def gone(self) -> None:
        """There is no server any more."""

    def waiting(self, settings: Settings, status: SupervisorStatus) -> None:
        """Nothing listens until `status.restart_at_s`."""

    def status(self, status: SupervisorStatus) -> None:
        """It changed."""

    def beat(self) -> None:
        """The supervisor lives."""

    def close(self) -> None:
        """The supervisor ends."""


class PortStandin(Companion):
    """Answers 503 with the reason while no server listens."""

    def __init__(self) -> None:
        self._standin: Any = None

    def waiting(self, settings: Settings, status: SupervisorStatus) -> None:
        from llama_phase.standin import standin_for

        self.close()
        self._standin = standin_for(settings)
        reason = status.failure.kind.replace("_", " ") if status.failure else "it ended"
        wait_s = 0.0 if status.restart_at_s is None else status.restart_at_s - now_s(status)
        self._standin.say(f"the server is being restarted: {reason}", wait_s)
        self._standin.open()

    def starting(self, settings: Settings) -> None:
        self.close()

    def close(self) -> None:
        if self._standin is not None:
            self._standin.close()
            self._standin = None


class ServiceManager(Companion):
    """Tells systemd, if it started us."""

    def __init__(self, environment: Mapping[str, str]):
        from llama_phase.systemd import Notifier

        self._notifier = Notifier.of(environment)

    def status(self, status: SupervisorStatus) -> None:
        from llama_phase.detached import summary

        line = summary(status)[0]
        if status.state == "ready":
            self._notifier.ready(line)
        elif status.state == "stopping":
            self._notifier.stopping(line)
        else:
            self._notifier.status(line)

    def beat(self) -> None:
        # a server that hangs is this supervisor's business; what systemd has to watch is this loop
        self._notifier.beat(time.monotonic(), healthy=True)


class MetricsPort(Companion):
    """The supervisor's metrics and the server's on a port of their own."""

    def __init__(self, settings: Settings, status: SupervisorStatus):
        """Raises PortBusy or UsageError when the port cannot be had."""
        from llama_phase.metrics import MetricsServer, read_server

        self._status, self._settings = status, settings
        self._server = MetricsServer(lambda: self._status, lambda: read_server(self._settings))
        self.port = self._server.start(settings.tcp_hosts[0], settings.metrics_port)

    def ready(self, server: Server) -> None:
        self._settings = server.settings

    def status(self, status: SupervisorStatus) -> None:
        self._status = status

    def close(self) -> None:
        self._server.close()


class Conversations(Companion):
    """Saves and restores what the slots hold. In a thread: it takes as long as the server does."""

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        """Raises UsageError for a port that is another one at the next start: nothing would be found again."""
        if settings.port == 0 and flag_value(settings.upstream, SLOT_SAVE_PATH) is None:
            raise UsageError(
                "conversations are kept by port, and port 0 is another one at each start",
                fix="choose a port: --port N, or a folder: `-- --slot-save-path DIR`, or do not keep conversations",
            )
        self._say = say
        self._keeper: Any = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="llama-phase-keeper")
        self._done: Future[None] | None = None

    def starting(self, settings: Settings) -> None:
        from llama_phase.conversation_keeper import ConversationKeeper

        ConversationKeeper(settings, self._say).prepare()

    def ready(self, server: Server) -> None:
        from llama_phase.conversation_keeper import ConversationKeeper

        self._keeper = ConversationKeeper(server.settings, self._say)
        self._done = self._worker.submit(self._keeper.ready)

    def stopping(self, server: Server, hurry: Callable[[], bool]) -> None:
        if self._keeper is None:
            return
        end_s = time.monotonic() + SAVE_WITHIN_S
        saved = self._worker.submit(self._keeper.stopping, within_s=SAVE_WITHIN_S)
        while not saved.done() and time.monotonic() < end_s and not hurry() and server.poll() is None:
            wait([saved], _HURRY_LOOK_S)

    def gone(self) -> None:
        if self._keeper is not None:
            self._worker.submit(self._keeper.gone)
            self._keeper = None

    def close(self) -> None:
        self._worker.shutdown(wait=False)


def companions_for(settings: Settings, status: SupervisorStatus, say: Callable[[str], None]) -> list[Companion]:
    """Those these settings and the environment ask for. Raises PortBusy or UsageError for the metrics' port,
    UsageError for conversations that would not be found again."""
    from llama_phase.instance import folder_of
    from llama_phase.kv_companion import KvNote
    from llama_phase.plan_companion import PlanCheck

    found: list[Companion] = [PortStandin(), ServiceManager(os.environ)]
    if settings.check_plan:
        found.append(PlanCheck(folder_of(settings), say))
    if settings.kv != "device":
        found.append(KvNote(say))
    if settings.keep_conversations:
        found.append(Conversations(settings, say))
    if settings.metrics_port:
        found.append(MetricsPort(settings, status))
    return found
