"""Asks one server what only it can say: healthy? the first prompt? its slots and phase. In a thread of its own, since
an answer may take minutes and a death or a signal must be seen at once. Facts go out through a queue and plain fields;
nothing is decided here."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from llama_phase.client import Client, RequestFailed
from llama_phase.errors import LlamaPhaseError
from llama_phase.hang_watch import Beat, beat_of
from llama_phase.lifecycle_terms import Loaded, Proved
from llama_phase.readiness import ProbeFailed, prove

HEALTH_EVERY_S = 0.1
BEAT_EVERY_S = 1.0
ANSWER_WITHIN_S = 30.0
CLOSED = (401, 403, 404, 501)  # slots are not for us, or not at all


class Observer(threading.Thread):
    """`make_client` makes a client of the server; `is_ours` says whether it is ours that listens there.

    `events` holds Loaded, Proved, and a LlamaPhaseError when the first prompt failed.
    """

    def __init__(
        self,
        make_client: Callable[[], Client],
        is_ours: Callable[[], bool],
        ubatch: int,
        *,
        ask_slots: bool = True,
        probe: Callable[[Client, int], float | None] = prove,
    ):
        super().__init__(name="llama-phase-observer", daemon=True)
        self.events: queue.SimpleQueue[Loaded | Proved | LlamaPhaseError] = queue.SimpleQueue()
        self.beat = Beat()
        self.phase: dict[str, Any] | None = None
        self.phase_known = False
        self._make_client, self._is_ours, self._ubatch, self._probe = make_client, is_ours, ubatch, probe
        self._ask_slots = ask_slots
        self._ended = threading.Event()

    def end(self) -> None:
        """Ask it to end; a request under way ends with the server."""
        self._ended.set()

    def run(self) -> None:
        with self._make_client() as client:
            while not (client.healthy(timeout_s=0.5) and self._is_ours()):
                if self._ended.wait(HEALTH_EVERY_S):
                    return
            self.events.put(Loaded())
            beats = threading.Thread(target=self._watch, name="llama-phase-beats", daemon=True)
            beats.start()
            try:
                proved = Proved(self._probe(client, self._ubatch))
                with contextlib.suppress(RequestFailed):
                    self.phase = client.phase(timeout_s=ANSWER_WITHIN_S)
                self.events.put(proved)
            except LlamaPhaseError as error:
                self.events.put(error)
            except Exception as error:  # whatever another llama-server may answer: nobody else would hear of it
                self.events.put(ProbeFailed(f"the server's answers make no sense: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        with self._make_client() as client:
            while True:
                self.look(client)
                if self._ended.wait(BEAT_EVERY_S):
                    return

    def look(self, client: Client) -> None:
        """Ask once. A server that does not answer leaves the last answer as it was."""
        answers = self.beat.answers + 1
        try:
            if self._ask_slots:
                self.beat = beat_of(client.slots(timeout_s=ANSWER_WITHIN_S), answers)
            else:
                self.beat = Beat(answers, None)
        except RequestFailed as error:
            if error.status in CLOSED:  # then its log has to do
                self._ask_slots = False
                self.beat = Beat(answers, None)
        except (AttributeError, TypeError, ValueError):  # slots of another shape
            self._ask_slots = False
            self.beat = Beat(answers, None)
        with contextlib.suppress(RequestFailed):
            self.phase = client.phase(timeout_s=ANSWER_WITHIN_S)
            self.phase_known = True
