"""Runs the lifecycle: does its actions, reports what came of them, writes down its state.

One thread decides and acts, in ticks. What an action is:

    Start       a new Attempt                                     -> Spawned, or Ended when it was refused
    Stop        wait until no request runs (grace time), stop     -> Gone
    NoteServed, NoteFailed   the journal                          Say   a line for the log
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llama_phase import lifecycle_terms as terms
from llama_phase.attempt import Attempt, refused
from llama_phase.companions import Companion
from llama_phase.configuration import Configuration, configuration_of, difference, environment_for, settings_for
from llama_phase.errors import LlamaPhaseError, UsageError
from llama_phase.journal import Journal
from llama_phase.lifecycle import Lifecycle
from llama_phase.lifecycle_terms import Policy, State
from llama_phase.running_servers import birth_of
from llama_phase.server import TICK_S, Server, find_binary
from llama_phase.settings import Settings
from llama_phase.supervisor_status import FILE_NAME as STATUS_FILE
from llama_phase.supervisor_status import OWN_ERROR, SupervisorStatus, write_status

WRITE_AGAIN_S = 2.0  # after a status could not be written


class Wishes(Protocol):
    """What the supervisor is asked for while it runs; see foreground.StopSignals."""

    def asked(self) -> bool: ...
    def asked_twice(self) -> bool: ...
    def change_asked(self) -> str | None: ...


class Supervisor:
    """Keeps one server running as `settings` ask, until told to stop. The caller holds the lock of `folder`.

    `error` is the last failure as a user meets it. `companions` are the caller's to fill before `run`. `mark` is told
    why the status cannot be written, and with an empty reason that it can be again.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        policy: Policy,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        wall: Callable[[], float] | None = None,
        mark: Callable[[str], None] = lambda reason: None,
    ):
        self.settings = settings
        self.folder = folder
        self.attempt: Attempt | None = None
        self.error: LlamaPhaseError | None = None
        self.companions: Sequence[Companion] = ()
        self._say, self._wall, self._mark = say, wall or steady_clock(), mark
        self._environment = dict(os.environ if environment is None else environment)
        self._journal = Journal(folder / "served")
        asked = configuration_of(settings, engine_of(settings), self._environment)
        begin = SupervisorStatus(
            supervisor_pid=os.getpid(),
            supervisor_birth_s=birth_of(os.getpid()) or 0.0,
            started_s=self._wall(),
            clock_offset_s=self._wall() - time.monotonic(),
            model=settings.model.name,
            configuration=asked.fingerprint,
            engine=asked.engine,
            url=settings.base_url if settings.port else "",
        )
        good = [record.configuration for record in self._journal.good()]
        self.lifecycle = Lifecycle(asked, good, policy, status=begin)
        self._published: SupervisorStatus | None = None
        self._unwritten = ""  # why the status could not be written, at the last try
        self._write_again_s = 0.0
        self._notes: tuple[str, ...] = ()

    @property
    def status(self) -> SupervisorStatus:
        return replace(self.lifecycle.status, notes=self._notes)

    def note(self, sentence: str) -> None:
        """A sentence for the log and, until the next start, for the status."""
        self._notes += (sentence,)
        self._say(sentence)

    def run(self, wishes: Wishes, tick: Callable[[], None] = lambda: None) -> SupervisorStatus:
        """Until stopped or failed; the last status. `tick` is called often. Whatever is raised, no server is left."""
        try:
            self._handle(terms.StopAsked() if wishes.asked() else terms.StartAsked(), wishes)
            while not self.lifecycle.over:
                self._look(wishes)
                tick()
                for companion in self.companions:
                    companion.beat()
                time.sleep(TICK_S)
        finally:
            self._drop()
            for companion in self.companions:
                companion.close()
        return self.status

    def end(self, exit_code: int, error: BaseException | None = None) -> None:
        """Write the last status, which outlives the process. `error`: what ended the run before it was over."""
        status = replace(self.lifecycle.status, exit_code=exit_code)
        if not self.lifecycle.over:
            what = f"{type(error).__name__}: {error}" if error is not None else "no error was told"
            self._notes += (f"{OWN_ERROR}: {what}",)
            gone = replace(status, server_pid=None, server_birth_s=None, restart_at_s=None)
            status = replace(gone, state=State.FAILED.value, since_s=self._wall())
        self.lifecycle.status, self._write_again_s = status, 0.0
        self._publish()

    def _look(self, wishes: Wishes) -> None:
        wanted = wishes.change_asked()
        if wishes.asked():
            self._handle(terms.StopAsked(), wishes)
        elif wanted:
            self._change(wanted, wishes)
        else:
            event = self.attempt.look() if self.attempt is not None else None
            if event is not None:
                self._handle(event, wishes)
            else:
                self._do(self.lifecycle.tick(self._wall()), wishes)
        self._publish()

    def _handle(self, event: terms.Event, wishes: Wishes) -> None:
        if isinstance(event, terms.Ended) and self.attempt is not None:
            self.error = self.attempt.error
            self._drop()
        was = self.lifecycle.state
        actions = self.lifecycle.handle(event, self._wall())
        if was is State.STARTING and self.lifecycle.state is State.READY and self.attempt is not None:
            self._say(f"ready: {self.attempt.server.url}")
            for companion in self.companions:
                companion.ready(self.attempt.server)
        self._publish()
        if self.lifecycle.status.restart_at_s is not None:
            for companion in self.companions:
                companion.waiting(self.settings, self.status)
        self._do(actions, wishes)

    def _do(self, actions: list[terms.Action], wishes: Wishes) -> None:
        for action in actions:
            if isinstance(action, terms.Say):
                self._say(action.text)
            elif isinstance(action, terms.NoteServed):
                self._write(lambda it=action: self._journal.served(it.configuration))
            elif isinstance(action, terms.NoteFailed):
                self._write(lambda it=action: self._journal.failed(it.configuration, it.failure.text))
            elif isinstance(action, terms.Start):
                self._publish()
                self._handle(self._start(action.configuration), wishes)
            else:
                self._publish()
                self._stop(wishes)
                self._handle(terms.Gone(), wishes)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._say(f"cannot write the journal in {self._journal.folder}: {error.strerror}; a rollback may miss this")

    def _start(self, configuration: Configuration) -> terms.Event:
        self._notes = ()
        try:
            settings = self.settings
            if configuration.fingerprint != self.lifecycle.asked.fingerprint:
                for line in difference(self.lifecycle.asked, configuration):
                    self._say(f"  {line}")
                settings = _settings_for(configuration, self.settings)
            for companion in self.companions:
                companion.starting(settings)
            for companion in self.companions:
                settings = companion.resolved(settings)
            environment = environment_for(configuration, self._environment)
            attempt = Attempt(Server(settings, base_environment=environment), self.folder, wall=self._wall)
            event = attempt.start()
        except LlamaPhaseError as error:
            self.error = error
            return terms.Ended(refused(error, self._wall()))
        self.attempt, server = attempt, attempt.server
        # a port of the system's choice is kept: clients know it by now
        self.settings = self.settings.model_copy(update={"port": server.settings.port})
        self._say(f"loading {server.settings.model} (pid {server.pid}), log: {server.log_path}")
        for sentence in server.notes:
            self.note(sentence)
        return event

    def _stop(self, wishes: Wishes) -> None:
        attempt = self.attempt
        if attempt is None:
            return

        def save() -> None:
            for companion in self.companions:
                companion.stopping(attempt.server, wishes.asked_twice)

        attempt.stop(wishes.asked_twice, save, self._say)
        self._drop()

    def _change(self, fingerprint: str, wishes: Wishes) -> None:
        for record in self._journal.good():
            if record.configuration.fingerprint == fingerprint:
                self._handle(terms.ChangeAsked(record.configuration), wishes)
                return
        self._say(f"there is no configuration {fingerprint} to go to")

    def _drop(self) -> None:
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None
            for companion in self.companions:
                companion.gone()

    def _publish(self) -> None:
        status = self.status
        changed = status != self._published
        if changed or (self._unwritten and time.monotonic() >= self._write_again_s):
            self._published = status
            self._write_status(status)
        if changed:
            for companion in self.companions:
                companion.status(status)

    def _write_status(self, status: SupervisorStatus) -> None:
        """A full disk must not stop what serves; that it cannot be written is said once, and in the lock."""
        reason = ""
        try:
            write_status(self.folder, status)
        except OSError as error:
            reason = error.strerror or str(error)
            self._write_again_s = time.monotonic() + WRITE_AGAIN_S
            if not self._unwritten:
                self._say(
                    f"cannot write {self.folder / STATUS_FILE}: {reason}; `llama-phase status` cannot tell the state"
                )
        if reason != self._unwritten:
            self._unwritten = reason
            self._mark(reason)


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that pass evenly: whoever sets the clock of the machine moves no deadline."""
    offset_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset_s


def engine_of(settings: Settings) -> str:
    """Id of the engine these settings run, else the program's path; empty when there is none."""
    from llama_phase.engine_id import read

    try:
        binary = find_binary(settings)
    except LlamaPhaseError:
        return ""
    info = read(binary.parent.parent) if settings.server_binary is None else None
    return info.id if info else str(binary)


def _settings_for(configuration: Configuration, asked: Settings) -> Settings:
    try:
        return settings_for(configuration, asked)
    except ValueError as error:
        raise UsageError(
            f"configuration {configuration.fingerprint} cannot be read by this version: {error}",
            fix="`llama-phase rollback --list` shows the others",
        ) from None
