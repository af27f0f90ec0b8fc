"""The state machine of a supervisor: single histories, then random ones under its invariants. No process, no sleep."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llama_phase import crash
from llama_phase import lifecycle_terms as lc
from llama_phase.configuration import Configuration
from llama_phase.lifecycle import Lifecycle
from llama_phase.lifecycle_terms import Policy, State
from llama_phase.supervisor_status import Failure

A, B, C = (Configuration({"model": f"/m/{name}.gguf"}, {}, "engine") for name in "abc")
POLICY = Policy(restarts=3, delay_s=1.0, delay_cap_s=4.0, settled_s=30.0, stable_s=600.0)


def failure(kind: str, was_ready: bool = False) -> Failure:
    deterministic = kind in crash.DETERMINISTIC and not was_ready
    return Failure(kind, f"it failed: {kind}", 0.0, deterministic=deterministic, was_ready=was_ready)


class Life:
    """Drives a lifecycle by hand: `up` and `fail` in the words of a test."""

    def __init__(self, asked: Configuration = A, good: tuple[Configuration, ...] = (), **policy: object):
        policy = {"restarts": 3, "delay_cap_s": 4.0} | policy
        self.machine = Lifecycle(asked, list(good), Policy(**policy), jitter=lambda: 1.0)  # type: ignore[arg-type]
        self.now_s = 1000.0
        self.starts: list[Configuration] = []
        self.served: list[Configuration] = []
        self.bad: list[Configuration] = []
        self.send(lc.StartAsked())

    def take(self, actions: list[lc.Action]) -> None:
        for action in actions:
            if isinstance(action, lc.Start):
                self.starts.append(action.configuration)
            elif isinstance(action, lc.NoteServed):
                self.served.append(action.configuration)
            elif isinstance(action, lc.NoteFailed):
                self.bad.append(action.configuration)

    def send(self, *events: lc.Event) -> Life:
        for event in events:
            self.take(self.machine.handle(event, self.now_s))
        return self

    def wait(self, seconds: float) -> Life:
        self.now_s += seconds
        self.take(self.machine.tick(self.now_s))
        return self

    def up(self) -> Life:
        return self.send(lc.Spawned(1), lc.Loaded(), lc.Proved(0.1))

    def fail(self, kind: str, was_ready: bool = False) -> Life:
        return self.send(lc.Ended(failure(kind, was_ready)))

    @property
    def state(self) -> str:
        return self.machine.state.value

    @property
    def status(self) -> object:
        return self.machine.status


def test_l7_health_alone_is_not_ready() -> None:
    life = Life()
    assert life.send(lc.Spawned(1), lc.Loaded()).state == "starting"
    assert life.send(lc.Proved(0.1)).state == "ready"


def test_a_proof_without_a_process_is_no_proof() -> None:
    assert Life().send(lc.Proved(0.1)).state == "starting"
    assert Life().send(lc.Loaded(), lc.Proved(0.1)).state == "starting"


def test_l1_a_deterministic_failure_is_not_repeated() -> None:
    life = Life().fail("bad_flag")
    assert life.state == "failed" and life.machine.over and len(life.starts) == 1


@pytest.mark.parametrize("kind", sorted(crash.KINDS))
def test_l12_no_kind_of_failure_is_repeated_for_ever(kind: str) -> None:
    for ready in (False, True):
        life = Life()
        for _ in range(20):
            if ready and life.state == "starting":
                life.up()
            life.fail(kind, was_ready=ready).wait(100)
        assert life.state == "failed" and len(life.starts) <= 4


def test_delays_double_up_to_the_cap_and_shrink_by_jitter() -> None:
    life, delays = Life(restarts=6), []
    for _ in range(5):
        life.fail("signal")
        delays.append(life.machine.status.restart_at_s - life.now_s)
        life.wait(10)
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    calm = Lifecycle(A, [], Policy(), jitter=lambda: 0.0)
    calm.handle(lc.StartAsked(), 5.0)
    calm.handle(lc.Ended(failure("signal")), 5.0)
    assert calm.status.restart_at_s == 5.5


def test_nothing_starts_before_its_time() -> None:
    life = Life().fail("signal")
    assert len(life.wait(0.9).starts) == 1 and len(life.wait(0.2).starts) == 2


def test_a_long_good_time_ends_a_row_of_crashes() -> None:
    life = Life(restarts=1)
    for _ in range(10):
        life.up().wait(601).fail("signal", was_ready=True).wait(10)
    assert life.state == "starting" and life.machine.status.restarts == 10


def test_a_crash_every_five_minutes_is_a_row() -> None:
    life = Life()
    for _ in range(10):
        if life.state == "starting":
            life.up().wait(300).fail("signal", was_ready=True).wait(10)
    assert life.state == "failed" and len(life.starts) == 4


@pytest.mark.parametrize("kind", ["bad_flag", "oom_load", "oom_transaction", "illegal_instruction", "missing_file"])
def test_l12_a_changed_configuration_that_fails_gives_way_to_the_last_good_one(kind: str) -> None:
    life = Life(B, (A, C)).fail(kind)
    assert life.starts == [B, A] and life.state == "starting"
    back = life.up().machine.status.rolled_back
    assert (back.failed, back.serving) == (B.fingerprint, A.fingerprint) and kind in str(back.reason)
    assert life.machine.status.rollbacks == 1


def test_the_breaker_leads_to_the_last_good_one_too() -> None:
    life = Life(B, (A,))
    for _ in range(4):
        life.up().fail("signal", was_ready=True).wait(10)
    assert life.starts == [B] * 4 + [A]


def test_two_bad_configurations_do_not_take_turns() -> None:
    life = Life(B, (A, C))
    for _ in range(40):
        life.fail("signal").wait(100)
    assert life.starts == [B] * 4 + [A] * 4 and life.state == "failed"


def test_a_new_configuration_that_served_a_while_is_given_up_as_well_and_noted() -> None:
    life = Life(B, (A,)).up().wait(31)
    assert life.served == [B]
    life.fail("signal", was_ready=True).wait(10)
    for _ in range(3):
        life.up().fail("signal", was_ready=True).wait(10)
    assert life.bad == [B] and life.starts[-1] == A


def test_what_served_last_before_is_not_blamed_for_its_surroundings() -> None:
    life = Life(A, (A,))
    for _ in range(4):
        life.fail("oom_load").wait(10)
    assert life.state == "failed" and life.bad == []


def test_an_unchanged_configuration_is_not_rolled_back() -> None:
    life = Life(A, (A, B)).fail("bad_flag")
    assert life.starts == [A] and life.state == "failed"


def test_memory_that_served_before_may_be_taken_for_a_moment_only() -> None:
    life = Life(A, (A,)).fail("oom_load")
    assert life.state == "starting" and life.machine.status.restart_at_s is not None
    assert Life(B, (A,), rollback=False).fail("oom_load").state == "failed"


def test_a_taken_port_is_nobodys_configuration() -> None:
    life = Life(B, (A,)).fail("port")
    assert life.starts == [B] and life.state == "failed" and life.bad == []
    later = Life(B, (A,)).up().fail("signal", was_ready=True).wait(10).fail("port")
    assert later.state == "starting", "it was ours, and may be again"


def test_rollback_can_be_switched_off() -> None:
    assert Life(B, (A,), rollback=False).fail("bad_flag").state == "failed"


def test_served_is_noted_once_a_request_was_answered_or_some_time_has_passed() -> None:
    assert Life().up().wait(29).served == []
    assert Life().up().wait(30).wait(30).served == [A]
    assert Life().up().send(lc.Served(), lc.Served()).wait(40).served == [A]
    assert Life().send(lc.Spawned(1), lc.Loaded(), lc.Served()).served == []


def test_by_hand_the_present_one_is_stopped_first() -> None:
    life = Life(B, (B, A)).up().send(lc.ChangeAsked(A))
    assert life.state == "stopping" and life.starts == [B]
    life.send(lc.Gone())
    assert life.starts == [B, A] and life.machine.status.rolled_back.by_hand
    assert life.fail("bad_flag").starts == [B, A, B], "the one that served before is still there"


@pytest.mark.parametrize("good", [(), (B,), (B, A), (A, B)], ids=["none", "other", "other, this", "this, other"])
@pytest.mark.parametrize("noted", [True, False])
def test_a_change_by_hand_that_comes_to_nothing_leads_back_to_what_served(
    good: tuple[Configuration, ...], noted: bool
) -> None:
    """Whatever the journal held when the supervisor started."""
    life = Life(A, good).up()
    if noted:
        life.send(lc.Served())
    life.send(lc.ChangeAsked(B), lc.Gone())
    life.fail("missing_file")
    assert life.up().state == "ready" and life.starts == [A, B, A], "at once, although it might pass"
    assert life.machine.status.rolled_back is None, "what was asked for serves"


def test_what_was_changed_to_by_hand_and_was_ready_is_tried_again_as_any_other() -> None:
    life = Life(A, (A, B)).up().send(lc.ChangeAsked(B), lc.Gone()).up().fail("signal", was_ready=True).wait(10)
    life.fail("oom_load")
    assert life.starts == [A, B, B] and life.machine.status.restart_at_s is not None
    back = Life(A, (A, B)).up().send(lc.ChangeAsked(B), lc.Gone()).fail("oom_load").fail("oom_load").wait(10)
    assert back.starts == [A, B, A, A], "what it went back to served before"


def test_a_change_by_hand_away_from_what_never_served_leads_to_the_last_good_one() -> None:
    life = Life(B, (A, C)).fail("signal").send(lc.ChangeAsked(C)).fail("bad_flag")
    assert life.starts == [B, C, A]


def test_a_stop_overrules_a_change() -> None:
    life = Life(B, (B, A)).up().send(lc.ChangeAsked(A), lc.StopAsked(), lc.Gone())
    assert life.state == "stopped" and life.starts == [B]


def test_a_stop_while_waiting_ends_it_at_once() -> None:
    life = Life().fail("signal").send(lc.StopAsked()).wait(100)
    assert life.state == "stopped" and life.machine.over and len(life.starts) == 1


class Histories(RuleBasedStateMachine):
    """Any order of events, also ones that make no sense."""

    @initialize(asked=st.sampled_from([A, B, C]), good=st.permutations([A, B, C]), n=st.integers(0, 3))
    def begin(self, asked: Configuration, good: list[Configuration], n: int) -> None:
        self.good = good[:n]
        self.possible = {item.fingerprint for item in self.good[:1]}  # to go back to
        self.asked = asked
        self.machine = Lifecycle(asked, self.good, POLICY, jitter=lambda: 0.5)
        self.now_s = 1.0
        self.alive = self.spawned = self.loaded = self.stop_asked = self.stopping = False
        self.n_starts = self.n_calm = self.n_by_hand = 0

    def take(self, actions: list[lc.Action]) -> None:
        for action in actions:
            if isinstance(action, lc.Start):
                assert not self.alive, "one server at a time"
                assert not self.stop_asked, "nothing starts after a stop"
                self.alive, self.spawned, self.loaded, self.stopping = True, False, False, False
                self.n_starts += 1
            elif isinstance(action, lc.Stop):
                assert self.alive
                self.stopping = True
            elif isinstance(action, lc.NoteServed):
                assert self.machine.state is State.READY
                assert action.configuration == self.machine.serving

    def send(self, event: lc.Event) -> None:
        self.take(self.machine.handle(event, self.now_s))

    @rule()
    def start(self) -> None:
        if not self.stop_asked:
            self.send(lc.StartAsked())

    @precondition(lambda self: self.alive)
    @rule()
    def spawn(self) -> None:
        self.spawned = True
        self.send(lc.Spawned(1))

    @rule(event=st.sampled_from([lc.Loaded(), lc.Proved(0.1), lc.Served()]))
    def progress(self, event: lc.Event) -> None:
        if isinstance(event, lc.Loaded):
            self.loaded = self.loaded or (self.alive and self.spawned)
        self.send(event)

    @precondition(lambda self: self.alive)
    @rule(kind=st.sampled_from(sorted(crash.KINDS)))
    def end(self, kind: str) -> None:
        self.alive = False
        self.send(lc.Ended(failure(kind, self.machine.state is State.READY)))

    @precondition(lambda self: self.stopping)
    @rule()
    def gone(self) -> None:
        self.alive = self.stopping = False
        self.send(lc.Gone())

    @rule(to=st.sampled_from([A, B, C]))
    def change(self, to: Configuration) -> None:
        self.n_by_hand += 1
        self.possible.add(self.machine.serving.fingerprint)
        self.send(lc.ChangeAsked(to))

    @rule()
    def stop(self) -> None:
        self.stop_asked = True
        self.send(lc.StopAsked())

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0, 700.0]))
    def wait(self, seconds: float) -> None:
        if self.machine.state is State.READY and seconds > POLICY.stable_s:
            self.n_calm += 1
        self.now_s += seconds
        self.take(self.machine.tick(self.now_s))

    @invariant()
    def ready_means_proved(self) -> None:
        if self.machine.state is State.READY:
            assert self.alive and self.spawned and self.loaded

    @invariant()
    def over_means_nothing_runs(self) -> None:
        if self.machine.over:
            assert not self.alive

    @invariant()
    def starts_are_bounded(self) -> None:
        rows = 2 + self.n_calm + 2 * self.n_by_hand  # there, and back again
        assert self.n_starts <= rows * (POLICY.restarts + 1)

    @invariant()
    def a_rollback_leads_to_what_served_last_or_was_left_by_hand(self) -> None:
        back = self.machine.status.rolled_back
        if back is not None and not back.by_hand:
            assert back.serving in self.possible


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
