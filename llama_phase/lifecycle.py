"""The life of one supervised server as a pure state machine: events and times in, actions out.

    stopped --start--> starting --proved--> ready
                       ^  |  ^                |
                       |  |  +--- ended ------+     restart after a delay, or the last good configuration
                       |  v
                       +-waiting                    `starting` with `restart_at_s`
    starting, ready --stop asked--> stopping --gone--> stopped
    starting --nothing left to try--> failed

Who drives it does each action and reports what came of it. All mutable state of a supervisor that decides anything is
here, and is changed by `handle` and `tick` only.

Restart rules. A deterministic failure is not repeated. Any other is, after a delay that doubles up to a cap, with
jitter, at most `restarts` times in a row; being ready for `stable_s` ends a row. When a row is at its end, the
configuration is given up, for good: the one that had served last before this supervisor started follows, or the one
that a change by hand left, if that is another one. So two bad ones cannot take turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from llama_phase import crash
from llama_phase.configuration import Configuration
from llama_phase.lifecycle_terms import (
    Action,
    ChangeAsked,
    Ended,
    Event,
    Gone,
    Loaded,
    NoteFailed,
    NoteServed,
    Policy,
    Proved,
    Say,
    Served,
    Spawned,
    Start,
    StartAsked,
    State,
    Stop,
    StopAsked,
)
from llama_phase.supervisor_status import Failure, Rollback, SupervisorStatus


class Lifecycle:
    """One server's life. `asked` is what the user wants, `good` what served last, newest first."""

    def __init__(
        self,
        asked: Configuration,
        good: list[Configuration],
        policy: Policy,
        *,
        jitter: Callable[[], float] = random.random,
        status: SupervisorStatus | None = None,
    ):
        self.asked = self.serving = asked
        self.policy = policy
        self.status = status or SupervisorStatus()
        self._good = {item.fingerprint for item in good}
        self._fallback = good[0] if good else None
        self._given_up: set[str] = set()
        self._jitter = jitter
        self._in_a_row = 0
        self._begun = False
        self._alive = False  # between Start and its Ended or Gone
        self._loaded = self._ever_loaded = False
        self._next: Configuration | None = None  # by hand, once the present one is gone
        self._on_trial = False  # changed to by hand and not ready yet, with one to go back to: no time is lost on it
        self._ready_s = self._start_s = 0.0
        self._noted = False

    @property
    def state(self) -> State:
        return State(self.status.state)

    @property
    def over(self) -> bool:
        """Nothing runs and nothing is going to."""
        return self._begun and self.state in (State.STOPPED, State.FAILED)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What to do about an event. Events that come too late for the state are ignored."""
        if isinstance(event, StartAsked):
            if self._begun:
                return []
            self._begun = True
            return self._start(now_s)
        if isinstance(event, Ended):
            return self._ended(event.failure, now_s)
        if isinstance(event, Gone):
            return self._gone(now_s)
        if isinstance(event, StopAsked):
            return self._stop(now_s)
        if isinstance(event, ChangeAsked):
            return self._change(event.configuration, now_s)
        if not self._alive or self.state is State.STOPPING:
            return []
        if isinstance(event, Spawned):
            self.status = replace(
                self.status, server_pid=event.pid, server_birth_s=event.birth_s, log=event.log, url=event.url
            )
        elif isinstance(event, Loaded) and self.state is State.STARTING and self.status.server_pid:
            self._loaded = self._ever_loaded = True
            self.status = replace(self.status, load_s=round(now_s - self._start_s, 3))
        elif isinstance(event, Proved) and self.state is State.STARTING and self._loaded:
            self._ready_s, self._noted, self._on_trial = now_s, False, False
            self._enter(State.READY, now_s, probe_s=event.probe_s)
        elif isinstance(event, Served) and self.state is State.READY:
            return self._note_served()
        return []

    def tick(self, now_s: float) -> list[Action]:
        """What is due by time alone."""
        if self.state is State.STARTING and not self._alive and now_s >= (self.status.restart_at_s or 0.0):
            return self._start(now_s)
        if self.state is State.READY and now_s - self._ready_s >= self.policy.settled_s:
            actions = self._note_served()
            if now_s - self._ready_s >= self.policy.stable_s:
                self._in_a_row = 0
            return actions
        return []

    def _start(self, now_s: float) -> list[Action]:
        self._alive, self._loaded, self._start_s = True, False, now_s
        self._enter(State.STARTING, now_s, server_pid=None, server_birth_s=None, load_s=None, probe_s=None)
        return [Start(self.serving)]

    def _stop(self, now_s: float) -> list[Action]:
        if self.state in (State.STOPPING, State.STOPPED, State.FAILED):
            self._begun = True
            self._next = None
            return []
        if not self._alive:
            self._enter(State.STOPPED, now_s)
            return []
        self._enter(State.STOPPING, now_s)
        return [Stop()]

    def _change(self, to: Configuration, now_s: float) -> list[Action]:
        if self.state in (State.STOPPING, State.STOPPED, State.FAILED):
            return []
        rollback = Rollback(self.serving.fingerprint, to.fingerprint, "asked for by hand", now_s, by_hand=True)
        self._leave_for(to)
        if not self._alive:
            return [*self._switch(to, rollback), *self._start(now_s)]
        self._next = to
        self._enter(State.STOPPING, now_s)
        return [Stop()]

    def _leave_for(self, to: Configuration) -> None:
        """What serves, or has served, is what follows when a change away from it by hand comes to nothing."""
        proved = self.state is State.READY or self.serving.fingerprint in self._good
        if proved and to.fingerprint != self.serving.fingerprint:
            self._fallback = self.serving
        back = self._fallback
        self._on_trial = self.policy.rollback and back is not None and back.fingerprint != to.fingerprint

    def _gone(self, now_s: float) -> list[Action]:
        if not self._alive:
            return []
        self._alive = False
        if self.state is State.STOPPING and self._next is not None:
            to, self._next = self._next, None
            rollback = Rollback(self.serving.fingerprint, to.fingerprint, "asked for by hand", now_s, by_hand=True)
            return [*self._switch(to, rollback), *self._start(now_s)]
        self._enter(State.STOPPED, now_s, server_pid=None, server_birth_s=None)
        return []

    def _ended(self, failure: Failure, now_s: float) -> list[Action]:
        if not self._alive:
            return []
        if self.state is State.STOPPING:  # it fell before it was pushed
            return self._gone(now_s)
        self._alive = False
        if self.state is State.READY and now_s - self._ready_s >= self.policy.stable_s:
            self._in_a_row = 0
        self._in_a_row += 1
        self.status = replace(self.status, failure=failure, server_pid=None, server_birth_s=None)
        known_good = self.serving.fingerprint in self._good and not self._on_trial
        final = failure.deterministic and not (known_good and failure.kind in crash.MAY_PASS)
        if failure.kind == "port":
            final = not self._ever_loaded  # somebody else's port, before we ever had it
        if not final and self._in_a_row <= self.policy.restarts:
            return self._again(failure, now_s)
        return self._give_up(failure, now_s)

    def _again(self, failure: Failure, now_s: float) -> list[Action]:
        delay_s = min(self.policy.delay_cap_s, self.policy.delay_s * 2 ** (self._in_a_row - 1))
        delay_s *= 0.5 + 0.5 * self._jitter()  # several servers of one machine shall not start at the same moment
        reasons = dict(self.status.restarts_by_reason)
        reasons[failure.kind] = reasons.get(failure.kind, 0) + 1
        self._enter(
            State.STARTING,
            now_s,
            restarts=self.status.restarts + 1,
            restarts_by_reason=reasons,
            restart_at_s=now_s + delay_s,
        )
        count = f"{self._in_a_row} of {self.policy.restarts}"
        return [Say(f"{_in_words(failure)}; restart {count} in {delay_s:.1f} s")]

    def _give_up(self, failure: Failure, now_s: float) -> list[Action]:
        actions: list[Action] = []
        fingerprint = self.serving.fingerprint
        self._given_up.add(fingerprint)
        to = self._fallback
        # what served last before is not blamed: its surroundings changed, and it may serve again
        blamed = fingerprint in self._good and (to is None or fingerprint != to.fingerprint)
        if blamed and failure.kind not in crash.NOT_OF_THE_CONFIGURATION:
            actions.append(NoteFailed(self.serving, failure))
        possible = (
            self.policy.rollback
            and to is not None
            and to.fingerprint not in self._given_up
            and failure.kind not in crash.NOT_OF_THE_CONFIGURATION
        )
        if not possible or to is None:
            self._enter(State.FAILED, now_s)
            return actions
        rollback = Rollback(fingerprint, to.fingerprint, f"{crash.KINDS[failure.kind]}: {failure.text}", now_s)
        return [*actions, Say(_in_words(failure)), *self._switch(to, rollback), *self._start(now_s)]

    def _switch(self, to: Configuration, rollback: Rollback) -> list[Action]:
        self.serving, self._in_a_row = to, 0
        self._on_trial = self._on_trial and rollback.by_hand
        self.status = replace(
            self.status,
            rollbacks=self.status.rollbacks + 1,
            rolled_back=None if to.fingerprint == self.asked.fingerprint else rollback,
            configuration=to.fingerprint,
            model=to.model,
        )
        return [Say(f"going back to configuration {to.fingerprint}, which served before ({to.model})")]

    def _note_served(self) -> list[Action]:
        if self._noted:
            return []
        self._noted = True
        self._good.add(self.serving.fingerprint)
        return [NoteServed(self.serving)]

    def _enter(self, state: State, now_s: float, **more: object) -> None:
        values: dict[str, object] = {"restart_at_s": None, "state": state.value, "since_s": now_s}
        self.status = replace(self.status, **(values | more))  # type: ignore[arg-type]


def _in_words(failure: Failure) -> str:
    last = f" ({failure.log_lines[-1].strip()})" if failure.log_lines else ""
    return f"{failure.text}{last}"
