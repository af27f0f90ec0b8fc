"""Runs the lifecycle: does its actions, reports what came of them, writes down its state.

One thread decides and acts, in ticks; an `Observer` asks the server in another. Nothing here waits for an answer, so
that a death, a signal or a hang is seen at once. What runs when:

    Start        make the server, an observer for it               -> Spawned, or Ended when it was refused
    each tick    process ended? observer's events? hanging? signals -> Ended, Loaded, Proved, StopAsked, ChangeAsked
    Stop         wait until no request runs (grace), stop           -> Gone
    NoteServed   journal
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from llama_phase import crash, lifecycle, server_log
from llama_phase.client import RequestFailed
from llama_phase.configuration import Configuration, configuration_of, difference, environment_for, settings_for
from llama_phase.errors import LlamaPhaseError, ServerCrash, ServerStartError, UsageError
from llama_phase.exit_meaning import name_status
from llama_phase.hang_dump import write_dump
from llama_phase.hang_watch import HangWatch
from llama_phase.journal import Journal
from llama_phase.lifecycle import Lifecycle, Policy, State
from llama_phase.observer import Observer
from llama_phase.port import listens
from llama_phase.readiness import ProbeFailed
from llama_phase.running_servers import birth_of
from llama_phase.server import TICK_S, Server, StallWatch, find_binary
from llama_phase.settings import Settings
from llama_phase.supervisor_status import SupervisorStatus, write_status

VITALS_EVERY_S = 1.0
DRAIN_LOOK_S = 0.2
LOST_S = 5.0  # between a broken connection and the end of its process
SERVED_LINE = "prompt eval time"  # of llama-server's log: a request was answered


class Signals(Protocol):
    """What asks the supervisor to do something else; see foreground.StopSignals."""

    def asked(self) -> bool: ...
    def asked_twice(self) -> bool: ...
    def change_asked(self) -> str | None: ...


class Companion(Protocol):
    """Something that goes along with the supervisor: metrics, the service manager, a stand-in on the port."""

    def status(self, status: SupervisorStatus) -> None:
        """The status changed."""

    def starting(self) -> None:
        """A server is about to take the port."""

    def ready(self, server: Server, client_url: str) -> list[str]:
        """A server is ready. Returns sentences for the status."""

    def stopping(self, server: Server) -> None:
        """A ready server that runs no request is about to be stopped."""

    def down(self, settings: Settings, status: SupervisorStatus) -> None:
        """Nothing listens for now; another attempt comes at `status.restart_at_s`."""

    def close(self) -> None:
        """The supervisor ends."""


class Supervisor:
    """Keeps one server running as `settings` ask, until told to stop. The caller holds the lock of `folder`."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        policy: Policy,
        say: Callable[[str], None],
        companions: tuple[Companion, ...] = (),
        make_server: Callable[..., Server] = Server,
        base_environment: dict[str, str] | None = None,
        wall: Callable[[], float] = time.time,
    ):
        self.settings = settings
        self.folder = folder
        self.server: Server | None = None
        self.observer: Observer | None = None
        self.error: LlamaPhaseError | None = None
        self.companions = companions
        self._say, self._make_server, self._wall = say, make_server, wall
        self._environment = dict(os.environ) if base_environment is None else base_environment
        self._journal = Journal(folder / "served", now=wall)
        asked = configuration_of(settings, engine_of(settings), self._environment)
        begin = SupervisorStatus(
            supervisor_pid=os.getpid(),
            supervisor_birth_s=birth_of(os.getpid()) or 0.0,
            started_s=wall(),
            model=settings.model.name,
            configuration=asked.fingerprint,
            engine=asked.engine,
            url=settings.base_url if settings.port else "",
        )
        good = [record.configuration for record in self._journal.good()]
        self.lifecycle = Lifecycle(asked, good, policy, status=begin)
        self._stall: StallWatch | HangWatch = StallWatch(0.0)
        self._vitals_at_s = 0.0
        self._log_tail: server_log.LogTail | None = None
        self._lost: tuple[float, LlamaPhaseError] | None = None
        self._written: SupervisorStatus | None = None
        self._notes: tuple[str, ...] = ()

    @property
    def status(self) -> SupervisorStatus:
        return replace(self.lifecycle.status, notes=self._notes)

    def run(self, signals: Signals, tick: Callable[[], None] = lambda: None) -> SupervisorStatus:
        """Until stopped or failed; the last status. `error` is then what made it fail, None when it was stopped.

        `tick` is called often. Whatever is raised on the way, no server is left.
        """
        try:
            event = lifecycle.StopAsked() if signals.asked() else lifecycle.StartAsked()
            self._handle(event, signals)
            while not self.lifecycle.over:
                self._look(signals)
                tick()
                time.sleep(TICK_S)
        finally:
            self._drop()
            for companion in self.companions:
                companion.close()
        return self.status

    def end(self, exit_code: int) -> None:
        """Write the last status, which outlives the process."""
        self.lifecycle.status = replace(self.lifecycle.status, exit_code=exit_code)
        self._publish()

    # --- looking ------------------------------------------------------------------------------------------------------

    def _look(self, signals: Signals) -> None:
        now_s = self._wall()
        if signals.asked():
            self._handle(lifecycle.StopAsked(), signals)
            return
        wanted = signals.change_asked()
        if wanted:
            self._change(wanted, signals)
            return
        event = self._event()
        if event is not None:
            self._handle(event, signals)
        else:
            self._do(self.lifecycle.tick(now_s), signals)
        self._publish()

    def _event(self) -> lifecycle.Event | None:
        server, observer = self.server, self.observer
        if server is None or observer is None:
            return None
        returncode = server.poll()
        if returncode is not None:
            return self._ended_by_itself(server, returncode)
        if not observer.events.empty():
            fact = observer.events.get()
            if not isinstance(fact, LlamaPhaseError):
                return self._good_news(fact)
            if isinstance(fact, ProbeFailed):
                return self._stopped_by_us(fact, fact.kind)
            # no answer at all: most likely the process is about to be gone, which says more
            self._lost = (time.monotonic() + LOST_S, fact)
        if self._lost is not None and time.monotonic() >= self._lost[0]:
            return self._stopped_by_us(ServerStartError(f"the first prompt failed: {self._lost[1]}"), "probe")
        return self._hanging(server, observer) or self._served()

    def _good_news(self, fact: lifecycle.Loaded | lifecycle.Proved) -> lifecycle.Event:
        assert self.server is not None
        if isinstance(fact, lifecycle.Loaded):
            self._stall = HangWatch(time.monotonic(), self.settings.stall_s)
        else:
            self.server.state = State.READY
        return fact

    def _hanging(self, server: Server, observer: Observer) -> lifecycle.Event | None:
        now_s = time.monotonic()
        if now_s < self._vitals_at_s:
            return None
        self._vitals_at_s = now_s + VITALS_EVERY_S
        vitals = server.vitals()
        limit_s = self.settings.stall_s
        if isinstance(self._stall, StallWatch):
            idle_s = self._stall.idle_s(now_s, vitals)
            if idle_s < limit_s:
                return None
            text, kind = f"llama-server showed no sign of life for {idle_s:.0f} s while starting", "hang_load"
        else:
            stuck_s = self._stall.stuck_s(now_s, vitals, observer.beat)
            if stuck_s is None:
                return None
            text, kind = f"llama-server made no progress for {stuck_s:.0f} s while busy", "hang"
        dump = write_dump(self.folder, server.pid or 0, vitals, observer)
        where = f"its state is in {dump}; " if dump else ""
        error_type = ServerStartError if server.state is not State.READY else ServerCrash
        error = error_type(
            f"{text}, and was stopped",
            fix=f"{where}the whole log is {server.log_path}; LLAMA_PHASE_STALL_S allows more",
        )
        return self._stopped_by_us(error, kind)

    def _served(self) -> lifecycle.Event | None:
        """A finished request in the log, looked for until one is found."""
        if self.lifecycle.state is not State.READY or self._log_tail is None:
            return None
        if any(SERVED_LINE in line for line in self._log_tail.read()):
            self._log_tail = None
            return lifecycle.Served()
        return None

    def _ended_by_itself(self, server: Server, returncode: int) -> lifecycle.Ended:
        was_ready = self.lifecycle.state is State.READY
        lines = server.reasons()
        kind = crash.kind_of_exit(returncode, lines, was_ready=was_ready)
        error = server.explain(returncode, lines, was_ready=was_ready)
        return self._ended(error, kind, returncode, lines)

    def _stopped_by_us(self, error: LlamaPhaseError, kind: str) -> lifecycle.Ended:
        assert self.server is not None
        lines = self.server.reasons()
        self.server.kill()
        return self._ended(error, kind, self.server.returncode, lines)

    def _ended(
        self, error: LlamaPhaseError, kind: str, returncode: int | None = None, lines: list[str] | None = None
    ) -> lifecycle.Ended:
        self.error = error
        log = str(self.server.log_path) if self.server and self.server.log_path else ""
        failure = crash.failure_of(
            error,
            kind=kind,
            at_s=self._wall(),
            returncode=returncode,
            was_ready=self.lifecycle.state is State.READY,
            log=log,
            lines=lines or (),
        )
        self._drop()
        return lifecycle.Ended(failure)

    # --- acting -------------------------------------------------------------------------------------------------------

    def _handle(self, event: lifecycle.Event, signals: Signals) -> None:
        was = self.lifecycle.state
        self._do(self.lifecycle.handle(event, self._wall()), signals)
        if was is State.STARTING and self.lifecycle.state is State.READY:
            self._became_ready()
        self._publish()
        if self.lifecycle.state is State.STARTING and self.lifecycle.status.restart_at_s is not None:
            for companion in self.companions:
                companion.down(self.settings, self.status)

    def _do(self, actions: list[lifecycle.Action], signals: Signals) -> None:
        for action in actions:
            if isinstance(action, lifecycle.Say):
                self._say(action.text)
            elif isinstance(action, lifecycle.NoteServed):
                self._note(lambda it=action: self._journal.served(it.configuration))
            elif isinstance(action, lifecycle.NoteFailed):
                self._note(lambda it=action: self._journal.failed(it.configuration, it.failure.text))
            elif isinstance(action, lifecycle.Start):
                self._publish()
                self._handle(self._start(action.configuration), signals)
            else:
                self._publish()
                self._stop(signals)
                self._handle(lifecycle.Gone(), signals)

    def _note(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._say(f"cannot write the journal in {self._journal.folder}: {error.strerror}; a rollback may miss this")

    def _start(self, configuration: Configuration) -> lifecycle.Event:
        for companion in self.companions:
            companion.starting()
        self._notes = ()
        try:
            settings = self.settings
            if configuration.fingerprint != self.lifecycle.asked.fingerprint:
                for line in difference(self.lifecycle.asked, configuration):
                    self._say(f"  {line}")
                settings = _settings_for(configuration, self.settings)
            environment = environment_for(configuration, self._environment)
            self.server = self._make_server(settings, base_environment=environment)
            self.server.start()
        except LlamaPhaseError as error:
            return self._ended(error, crash.kind_of_error(error))
        server = self.server
        # a port of the system's choice is kept: clients know it by now
        self.settings = self.settings.model_copy(update={"port": server.settings.port})
        self.observer = Observer(
            server.client,
            lambda: listens(server.pid or 0, server.settings.port),
            server.settings.ubatch,
            ask_slots="--sleep-idle-seconds" not in server.settings.upstream,  # asking would keep it awake
        )
        self.observer.start()
        self._stall, self._vitals_at_s = StallWatch(time.monotonic()), 0.0
        self._log_tail = self._lost = None
        self._say(f"loading {server.settings.model} (pid {server.pid}), log: {server.log_path}")
        return lifecycle.Spawned(server.pid or 0, birth_of(server.pid or 0), str(server.log_path), server.url)

    def _became_ready(self) -> None:
        assert self.server is not None and self.server.log_path is not None
        self._log_tail = server_log.LogTail(self.server.log_path)
        self._log_tail.position = server_log.size_bytes(self.server.log_path)  # our own first prompt is no client's
        self._say(f"ready: {self.server.url}")
        for companion in self.companions:
            self._notes += tuple(companion.ready(self.server, self.server.url))

    def _stop(self, signals: Signals) -> None:
        if self.server is None:
            return
        now = " (Ctrl-C again: at once)" if getattr(signals, "first", None) == 2 else ""
        self._say(f"stopping{now}")
        if self.server.state is State.READY:
            self._drain(self.server, signals)
            if not signals.asked_twice():
                for companion in self.companions:
                    companion.stopping(self.server)
        self.server.stop(hurry=signals.asked_twice)
        self._drop()

    def _drain(self, server: Server, signals: Signals) -> None:
        """Wait until no slot works, at most the grace time: llama-server itself cuts what runs when told to end."""
        deadline_s = time.monotonic() + server.settings.grace_s
        said = False
        with server.client() as client:
            while time.monotonic() < deadline_s and not signals.asked_twice() and server.poll() is None:
                try:
                    slots: list[dict[str, Any]] = client.slots(timeout_s=1.0)
                except RequestFailed as error:
                    if error.status != 0:
                        return  # it does not say
                    continue
                if not any(slot.get("is_processing") for slot in slots):
                    return
                if not said:
                    said = True
                    self._say(f"requests are running, waiting for them up to {server.settings.grace_s} s")
                time.sleep(DRAIN_LOOK_S)

    def _change(self, fingerprint: str, signals: Signals) -> None:
        for record in self._journal.good():
            if record.configuration.fingerprint == fingerprint:
                self._handle(lifecycle.ChangeAsked(record.configuration), signals)
                return
        self._say(f"there is no configuration {fingerprint} to go to")

    def _drop(self) -> None:
        if self.observer is not None:
            self.observer.end()
            self.observer = None
        if self.server is not None:
            self.server.close()
            self.server = None

    def _publish(self) -> None:
        status = self.status
        if status == self._written:
            return
        self._written = status
        # a full disk must not stop what serves; readers then see an old status of a living supervisor
        with contextlib.suppress(OSError):
            write_status(self.folder, status)
        for companion in self.companions:
            companion.status(status)


def engine_of(settings: Settings) -> str:
    """Id of the engine these settings run, else the program's path; empty when there is none."""
    from llama_phase.engine_id import read

    try:
        binary = find_binary(settings)
    except LlamaPhaseError:
        return ""
    info = read(binary.parent.parent) if settings.server_binary is None else None
    return info.id if info else str(binary)


def describe(failure_code: int) -> str:
    """An exit status in words; for status lines."""
    return name_status(failure_code)


def _settings_for(configuration: Configuration, asked: Settings) -> Settings:
    try:
        return settings_for(configuration, asked)
    except ValueError as error:
        raise UsageError(
            f"configuration {configuration.fingerprint} cannot be read by this version: {error}",
            fix="`llama-phase rollback --list` shows the others",
        ) from None
