"""When conversations are saved and restored in the life of a supervised server. With `keep_conversations` off: never.

prepare -> spawn -> healthy, probed -> ready (restores) -> saving at intervals -> stopping (saves) -> SIGTERM
                                                                               -> gone (died: saves nothing)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llama_phase.client import RequestFailed
from llama_phase.conversations import Conversations, Outcome, folder_for, identity_of, is_due
from llama_phase.errors import LlamaPhaseError
from llama_phase.settings import Settings
from llama_phase.slot_client import SlotClient

TICK_S = 0.25
SLEEPS = "--sleep-idle-seconds"


class ConversationKeeper:
    """Methods are called by the supervisor, from one thread. `say` gets a sentence for what was saved, restored or
    dropped, from the keeper's own thread, too. No method raises for a server that fails."""

    def __init__(
        self, settings: Settings, say: Callable[[str], None], *, connect: Callable[[], SlotClient] | None = None
    ):
        """`settings` with the real port. `connect` opens a client for the server, which is closed again."""
        self._settings, self._say = settings, say
        self._connect = connect or (lambda: SlotClient(settings.base_url, api_key=settings.probe_key))
        self._life: _Life | None = None
        self._said: set[str] = set()

    def prepare(self) -> None:
        """Before each spawn. Raises LlamaPhaseError when the folder cannot be made."""
        if self._settings.keep_conversations:
            folder_for(self._settings)

    def ready(self) -> None:
        """The server answers and was probed: restore, then save at intervals. Takes as long as the server does."""
        if not self._settings.keep_conversations:
            return
        self.gone()
        client = self._connect()
        try:
            identity = identity_of(self._settings.model, client.props())
            conversations = Conversations(folder_for(self._settings), client, identity)
        except (LlamaPhaseError, OSError) as error:
            client.close()
            self._say(f"conversations are not kept: {error}")
            return
        self._tell("restored", conversations.restore())
        # asking keeps a server awake, and wakes it up
        every_s = 0 if SLEEPS in self._settings.upstream else self._settings.conversations_every_s
        self._life = _Life(client, conversations, every_s, self._tell)
        self._life.start()

    def stopping(self, *, within_s: float) -> None:
        """Before SIGTERM, after the requests have drained: save, but wait no longer than `within_s`."""
        if self._life is not None:
            self._life.end(save=True)
            self._life.join(within_s)
        self._life = None

    def gone(self) -> None:
        """The server is no more: no further saving. Idempotent."""
        if self._life is not None:
            self._life.end(save=False)
        self._life = None

    def _tell(self, done: str, outcome: Outcome) -> None:
        """Successes at intervals are not worth a line; what is dropped always is."""
        if done and outcome.slots:
            plural = "s" if len(outcome.slots) > 1 else ""
            self._say(f"conversations {done}: slot{plural} {', '.join(map(str, outcome.slots))}")
        for sentence in outcome.dropped:
            if sentence not in self._said:  # the same at every interval is not news
                self._said.add(sentence)
                self._say(sentence)


class _Life(threading.Thread):
    """Of one server: saves at intervals, at the end if told so, and closes the client, which nobody else uses then."""

    def __init__(
        self,
        client: SlotClient,
        conversations: Conversations,
        every_s: int,
        tell: Callable[[str, Outcome], None],
    ):
        super().__init__(name="llama-phase-conversations", daemon=True)
        self._client, self._conversations, self._every_s, self._tell = client, conversations, every_s, tell
        self._ended, self._save_last = threading.Event(), False

    def end(self, *, save: bool) -> None:
        self._save_last = save
        self._ended.set()

    def run(self) -> None:
        began_s = time.monotonic()
        with self._client:
            while not self._ended.wait(TICK_S):
                if is_due(time.monotonic(), began_s, self._every_s):
                    outcome = self._conversations.save()
                    began_s = time.monotonic()
                    if not self._ended.is_set():  # what fails because the server goes down is not worth saying
                        self._tell("", outcome)
            if self._save_last and not self._sleeps():
                self._tell("saved", self._conversations.save())

    def _sleeps(self) -> bool:
        """A server that sleeps holds no conversation any more."""
        try:
            return bool(self._client.props().get("is_sleeping"))
        except RequestFailed:
            return False
