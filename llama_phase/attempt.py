"""One start of a server, from process to its end: what happens to it as events of the lifecycle.

Nothing here waits for an answer of the server: an `Observer` does that in a thread of its own, so that a death or a
hang is seen at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from llama_phase import crash, server_log
from llama_phase.client import RequestFailed
from llama_phase.errors import LlamaPhaseError, ServerCrash, ServerStartError
from llama_phase.hang_dump import write_dump
from llama_phase.hang_watch import HangWatch
from llama_phase.lifecycle_terms import Ended, Event, Loaded, Proved, Served, Spawned, State
from llama_phase.observer import Observer
from llama_phase.port import listens
from llama_phase.readiness import ProbeFailed
from llama_phase.running_servers import birth_of
from llama_phase.server import Server
from llama_phase.stall_watch import StallWatch
from llama_phase.supervisor_status import Failure

VITALS_EVERY_S = 1.0
MIN_HANG_S = 3.0  # several beats of the observer
LOST_S = 8.0  # between a broken connection and the end of its process; the engine's own last wait is 5
DRAIN_LOOK_S = 0.2
SERVED_LINE = "prompt eval time"  # of llama-server's log: a request was answered


class Attempt:
    """Owns a server that was not started yet. `error` is what ended it, None while nothing did.

    Call `start` once, then `look` often; `stop` or `close` at any time, any number of times.
    """

    def __init__(self, server: Server, folder: Path, *, wall: Callable[[], float] = time.time):
        """`folder` gets the dump of a server that hangs; `wall` is the clock of events."""
        self.server = server
        self.error: LlamaPhaseError | None = None
        self.observer: Observer | None = None
        self._folder, self._wall = folder, wall
        self._stall: StallWatch | HangWatch = StallWatch(0.0)
        self._vitals_at_s = 0.0
        self._lost: tuple[float, LlamaPhaseError] | None = None
        self._tail: server_log.LogTail | None = None

    def start(self) -> Spawned:
        """Raises what Server.start raises; nothing is left then."""
        server = self.server
        server.client().close()  # an API key that cannot be read is said now, not by a thread
        server.start()
        pid, settings = server.pid or 0, server.settings
        self.observer = Observer(
            server.client,
            lambda: listens(pid, settings.port),
            settings.ubatch,
            ask_slots="--sleep-idle-seconds" not in settings.upstream,  # asking would keep it awake
        )
        self.observer.start()
        self._stall = StallWatch(time.monotonic())
        return Spawned(pid, birth_of(pid), str(server.log_path), server.url)

    def look(self) -> Event | None:
        """The next thing that happened. After an Ended nothing of the server is left."""
        if self.observer is None:
            return None
        returncode = self.server.poll()
        if returncode is not None:
            lines = self.server.reasons()
            kind = crash.kind_of_exit(returncode, lines, was_ready=self._was_ready)
            return self._ended(self.server.explain(returncode, lines, was_ready=self._was_ready), kind, lines)
        if not self.observer.events.empty():
            fact = self.observer.events.get()
            if not isinstance(fact, LlamaPhaseError):
                return self._good_news(fact)
            # without an answer most likely the process is about to be gone, which says more
            wait = not isinstance(fact, ProbeFailed) or fact.dying
            self._lost = (time.monotonic() + (LOST_S if wait else 0.0), fact)
        if self._lost is not None and time.monotonic() >= self._lost[0]:
            cause = self._lost[1]
            if not isinstance(cause, ProbeFailed):
                cause = ProbeFailed(f"the first prompt failed: {cause}", fix=cause.fix)
            return self._end(cause, cause.kind)
        return self._hanging(self.observer) or self._served()

    def stop(self, hurry: Callable[[], bool], before: Callable[[], None], say: Callable[[str], None]) -> None:
        """Wait until no request runs, at most the grace time; do `before`; stop it. At once as soon as `hurry`."""
        if self._was_ready and self.server.poll() is None:
            self._drain(hurry, say)
            if not hurry():
                before()
        self.server.stop(hurry=hurry)
        self.close()

    def close(self) -> None:
        if self.observer is not None:
            self.observer.end()
        self.server.close()

    @property
    def _was_ready(self) -> bool:
        return self.server.state is State.READY

    def _good_news(self, fact: Loaded | Proved) -> Event:
        if isinstance(fact, Loaded):
            self._stall = HangWatch(time.monotonic(), max(self.server.settings.stall_s, MIN_HANG_S))
        else:
            self.server.state = State.READY
            log = self.server.log_path or Path()
            self._tail = server_log.LogTail(log)
            self._tail.position = server_log.size_bytes(log)  # our own first prompt is no client's
        return fact

    def _hanging(self, observer: Observer) -> Ended | None:
        now_s = time.monotonic()
        if now_s < self._vitals_at_s:
            return None
        self._vitals_at_s = now_s + VITALS_EVERY_S
        server, vitals = self.server, self.server.vitals()
        if isinstance(self._stall, StallWatch):
            idle_s = self._stall.idle_s(now_s, vitals)
            if idle_s < server.settings.stall_s:
                return None
            text, kind = f"llama-server showed no sign of life for {idle_s:.0f} s while starting", "hang_load"
        else:
            stuck_s = self._stall.stuck_s(now_s, vitals, observer.beat)
            if stuck_s is None:
                return None
            text, kind = f"llama-server made no progress for {stuck_s:.0f} s while busy", "hang"
        dump = write_dump(self._folder, server.pid or 0, vitals, observer)
        where = f"its state is in {dump}; " if dump else ""
        error_type = ServerCrash if self._was_ready else ServerStartError
        fix = f"{where}the whole log is {server.log_path}; LLAMA_PHASE_STALL_S allows more"
        return self._end(error_type(f"{text}, and was stopped", fix=fix), kind)

    def _served(self) -> Served | None:
        """A finished request in the log, looked for until one is found."""
        if self._tail is None or not any(SERVED_LINE in line for line in self._tail.read()):
            return None
        self._tail = None
        return Served()

    def _end(self, error: LlamaPhaseError, kind: str) -> Ended:
        lines, was_ready = self.server.reasons(), self._was_ready
        self.server.kill()
        return self._ended(error, kind, lines, was_ready)

    def _ended(self, error: LlamaPhaseError, kind: str, lines: list[str], was_ready: bool | None = None) -> Ended:
        self.error = error
        failure = crash.failure_of(
            error,
            kind=kind,
            at_s=self._wall(),
            returncode=self.server.returncode,
            was_ready=self._was_ready if was_ready is None else was_ready,
            log=str(self.server.log_path or ""),
            lines=lines,
        )
        self.close()
        return Ended(failure)

    def _drain(self, hurry: Callable[[], bool], say: Callable[[str], None]) -> None:
        """llama-server itself cuts what runs when it is told to end."""
        grace_s = self.server.settings.grace_s
        deadline_s, said = time.monotonic() + grace_s, False
        with self.server.client() as client:
            while time.monotonic() < deadline_s and not hurry() and self.server.poll() is None:
                try:
                    slots = client.slots(timeout_s=1.0)
                except RequestFailed as error:
                    if error.status != 0:
                        return  # it does not say
                    continue
                if not any(slot.get("is_processing") for slot in slots):
                    return
                if not said:
                    said = True
                    say(f"requests are running, waiting for them up to {grace_s} s")
                time.sleep(DRAIN_LOOK_S)


def refused(error: LlamaPhaseError, at_s: float) -> Failure:
    """The failure of a start that was refused before there was a process."""
    return crash.failure_of(error, kind=crash.kind_of_error(error), at_s=at_s)
