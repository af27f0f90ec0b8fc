"""Every step of a transaction made to fail with slots on (LLAMA_PHASE_FAULT): answers are stock's at the same split,
the slots are as many as documented, and the next transaction has them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, EngineServer, mtp, steps_of, wait_until
from expert_servers import N_EXPERT, N_LAYER, N_USED, TRANSACTION, ExpertFleet, experts, stopped_at_the_end

pytestmark = pytest.mark.engine

MODELS = ["qwen3moe", "qwen4exp", "qwen35moe"]
MTP = mtp(3)
WITH_DRAFTS = [("qwen3moe", ()), ("qwen4exp", MTP), ("qwen35moe", MTP)]  # where there is an MTP block
N_SLOTS = 20
N_LONG, N_SHORT, N_ANSWER = 300, 6, 24
RETRY = "leave.retry_decode_buffers"
ENTER, UNDO = steps_of("enter"), steps_of("undo")
LEAVE = [step for step in steps_of("leave") if step != RETRY]


@pytest.fixture
def start(servers: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    """`start(model, *args, FAULT=...)`: a server with slots and transactions, of this test alone."""
    with stopped_at_the_end(servers) as start_any:

        def start_one(model: str, *args: str, n_slots: int = N_SLOTS, **more) -> EngineServer:
            return start_any(model, n_slots, *args, **(TRANSACTION | more))

        yield start_one


@pytest.fixture
def check(servers: ExpertFleet, prompt) -> Callable[..., None]:
    """`check(server, model, *args, switched=True)`: a long prompt, then two short ones, against stock."""

    def check_answers(server: EngineServer, model: str, *args: str, switched: bool = True) -> None:
        for n, ubatch in (
            (N_LONG, PREFILL_UBATCH if switched else DECODE_UBATCH),
            (N_SHORT, DECODE_UBATCH),
            (N_SHORT, DECODE_UBATCH),
        ):
            tokens = prompt(model, n, seed=n)
            assert server.complete(tokens, n=N_ANSWER) == servers.stock_answer(
                model, tokens, N_ANSWER, *args, ubatch=ubatch
            ), f"prompt of {n} tokens"

    return check_answers


def slots_of(server: EngineServer) -> list[int]:
    return [member["slots_per_layer"] for member in server.phase()["experts"]]


def looked_up(server: EngineServer) -> int:
    return experts(server)["slots"]["looked_up"]


def assert_sane(server: EngineServer) -> None:
    for member in server.phase()["experts"]:
        assert member["ring_bytes"] == 0, "no ring outside the prefill phase"
        assert bool(member["slot_bytes"]) == bool(member["slots_per_layer"])
        for layer in member["layers"]:
            assert layer["hit"] + layer["missed"] == layer["looked_up"]
            assert layer["evicted"] <= layer["missed"] <= layer["looked_up"]


@pytest.mark.parametrize("step", ENTER)
@pytest.mark.parametrize(("model", "args"), WITH_DRAFTS)
def test_enter_fails(start, check, model: str, args: tuple[str, ...], step: str) -> None:
    """Rolled back: as many slots as before, with the experts of before."""
    batch = 4 if args else 1
    server = start(model, *args, EXPERT_BATCH=batch, FAULT=f"{step}:2")
    check(server, model, *args)
    check(server, model, *args, switched=False)
    assert server.counters() | {"entered": 1, "left": 1, "rolled_back": 1} == server.counters()
    assert slots_of(server) == [N_SLOTS, *([N_EXPERT] if args else [])]
    assert_sane(server)
    check(server, model, *args)
    assert server.counters()["left"] == 2


def test_roll_back_keeps_the_working_set(start, prompt) -> None:
    """All experts are resident; after a roll back a text that was answered before causes no miss."""
    model = "qwen3moe"
    for step in ENTER:
        server = start(model, n_slots=N_EXPERT, FAULT=step)
        short = prompt(model, 1)
        server.complete(short, n=60)
        server.complete(prompt(model, N_LONG), n=1)
        before = experts(server)["slots"]["missed"]
        server.complete(short, n=60)
        assert server.counters()["rolled_back"] == 1
        assert experts(server)["slots"]["missed"] == before, step


@pytest.mark.parametrize("step", LEAVE)
@pytest.mark.parametrize(("model", "args"), WITH_DRAFTS)
def test_leave_fails_once(start, check, model: str, args: tuple[str, ...], step: str) -> None:
    """The retry gives the slots up, so that decode has its buffers; the next transaction brings them back."""
    batch = 4 if args else 1
    server = start(model, *args, EXPERT_BATCH=batch, FAULT=step)
    before = looked_up(server)
    check(server, model, *args)
    assert slots_of(server) == [0] * (1 + bool(args))
    assert experts(server)["note"] == f"no slots until the next prompt: {step}: injected fault"
    assert looked_up(server) == before, "the stock path"
    assert_sane(server)
    check(server, model, *args)
    assert slots_of(server) == [N_SLOTS, *([N_EXPERT] if args else [])]
    assert looked_up(server) > before
    assert server.counters() | {"entered": 2, "left": 2, "failed": 0, "rolled_back": 0} == server.counters()
    assert_sane(server)


@pytest.mark.parametrize("fault", [f"{LEAVE[3]},{RETRY}", *(f"{ENTER[-1]},{step}" for step in UNDO)])
def test_fails_for_good(start, prompt, fault: str) -> None:
    """503 with the reason and exit code 75, slots or not."""
    server = start("qwen3moe", FAULT=fault)
    response = server.post(prompt("qwen3moe", N_LONG))
    assert response.status_code == 503
    assert fault.split(",")[1] in response.json()["error"]["message"]
    assert server.wait_exit() == 75


@pytest.mark.parametrize("model", MODELS)
def test_slots_do_not_fit_once(start, check, model: str) -> None:
    """Half as many, and why; the next transaction has all of them."""
    server = start(model, FAULT="slots.allocate")
    check(server, model)
    assert slots_of(server) == [N_SLOTS // 2]
    assert "no memory for 20 slots per layer: injected fault" in experts(server)["note"]
    assert "no memory for 20 slots per layer" in server.log_text()
    assert looked_up(server) > 0
    assert server.counters()["left"] == 1 and server.phase()["last_transaction"]["outcome"] == "committed"
    check(server, model)
    assert slots_of(server) == [N_SLOTS] and "note" not in experts(server)
    assert_sane(server)


def test_slots_fit_at_the_third_try(start, check) -> None:
    """20, 10, 5: never below the fewest that are safe."""
    model = "qwen3moe"
    server = start(model, FAULT="slots.allocate:1,slots.allocate:2")
    check(server, model)
    assert slots_of(server) == [5]
    fewest = start(model, EXPERT_BATCH=3, FAULT="slots.allocate:1")
    check(fewest, model)
    assert slots_of(fewest) == [3 * N_USED]


@pytest.mark.parametrize("model", MODELS)
def test_slots_never_fit(start, check, model: str) -> None:
    """The stock path, never an error; four tries, the last with the fewest that are safe."""
    server = start(model, FAULT="slots.allocate:*")
    check(server, model)
    assert slots_of(server) == [0]
    assert "no memory for 4 slots per layer" in experts(server)["note"]
    assert "host experts take the stock path until the next prompt" in server.log_text()
    check(server, model)
    assert server.counters() | {"entered": 2, "left": 2, "rolled_back": 0, "failed": 0} == server.counters()
    assert_sane(server)


def test_slots_come_back_after_none(start, check) -> None:
    model = "qwen3moe"
    tries = 4  # 20, 10, 5, 4
    server = start(model, FAULT=",".join(f"slots.allocate:{nth + 1}" for nth in range(tries)))
    check(server, model)
    assert slots_of(server) == [0]
    check(server, model)
    assert slots_of(server) == [N_SLOTS] and "note" not in experts(server)
    assert looked_up(server) > 0


def test_slots_do_not_fit_in_a_roll_back(start, check) -> None:
    """The undo takes what it can get, too."""
    model = "qwen3moe"
    server = start(model, FAULT=f"{ENTER[-1]},slots.allocate")
    check(server, model, switched=False)
    assert slots_of(server) == [N_SLOTS // 2]
    assert server.counters() | {"rolled_back": 1, "failed": 0} == server.counters()
    check(server, model)
    assert slots_of(server) == [N_SLOTS]


def test_slots_of_a_draft_do_not_fit(start, check) -> None:
    """The second member's allocation fails: the target keeps all of its slots."""
    model = "qwen4exp"
    server = start(model, *MTP, EXPERT_BATCH=4, FAULT="slots.allocate:2")
    check(server, model, *MTP)
    assert slots_of(server) == [N_SLOTS, N_EXPERT // 2]


@pytest.mark.parametrize(
    ("fault", "n_regions"),
    [("ring.allocate", 2), ("ring.allocate:1,ring.allocate:2", 0), ("ring.allocate:*", 0)],
)
@pytest.mark.parametrize("model", MODELS)
def test_ring_does_not_fit(start, check, prompt, model: str, fault: str, n_regions: int) -> None:
    """A smaller ring, then none: the prefill micro-batch all the same, with the stock path's experts."""
    server = start(model, RING=3, FAULT=fault, sizes={"ctx": 8192})
    with server.stream(prompt(model, 7000)):
        state = wait_until(lambda: (s := server.phase())["phase"] == "prefill" and s, "in the prefill phase")
    assert state["experts"][0]["ring_regions"] == n_regions
    assert bool(state["experts"][0]["ring_bytes"]) == bool(n_regions)
    assert "no memory for a ring of " in state["experts"][0]["note"]
    assert "no memory for a ring of 3 layers: injected fault" in server.log_text()
    wait_until(lambda: server.phase()["phase"] == "decode", "cancelled")
    assert "no memory for a ring of " in experts(server)["note"], "said when the ring is gone, too"
    before = experts(server)["ring"]["layers_streamed"]
    check(server, model)
    streamed = experts(server)["ring"]["layers_streamed"] - before
    assert streamed == 0 if fault.endswith("*") else streamed >= N_LAYER
    assert ("note" in experts(server)) == fault.endswith("*"), "gone with the first ring that is as asked for"
    assert slots_of(server) == [N_SLOTS]
    assert_sane(server)


@pytest.mark.parametrize(("model", "args"), WITH_DRAFTS)
def test_ring_does_not_start(start, check, model: str, args: tuple[str, ...]) -> None:
    """Behind the last allocation: rolled back like any failed step; the next prompt enters."""
    server = start(model, *args, EXPERT_BATCH=4 if args else 1, FAULT="ring.start")
    check(server, model, *args, switched=False)
    state = server.phase()
    assert state["counters"] | {"entered": 0, "rolled_back": 1, "failed": 0} == state["counters"]
    assert state["last_failure"] == "enter.reserve_prefill_buffers: injected fault"
    assert slots_of(server) == [N_SLOTS, *([N_EXPERT] if args else [])]
    assert_sane(server)
    check(server, model, *args)
    assert server.counters()["left"] == 1


def test_ring_once_smaller_answers(start, check) -> None:
    """The very prompt that runs with the smaller ring, or without."""
    for fault in ("ring.allocate", "ring.allocate:1,ring.allocate:2"):
        check(start("qwen3moe", RING=3, FAULT=fault), "qwen3moe")


@pytest.mark.parametrize("restore", ["cold", "snapshot", "prompt"])
def test_fewer_slots_than_were_remembered(start, check, restore: str) -> None:
    """20 experts of a layer are remembered, 10 find a place, then 20 again."""
    model = "qwen3moe"
    server = start(model, RESTORE=restore, FAULT="slots.allocate:2,slots.allocate:3")
    for n_slots in (N_SLOTS, 5, N_SLOTS):
        check(server, model)
        assert slots_of(server) == [n_slots]
    assert_sane(server)


def test_bypass_keeps_the_slots(start, check) -> None:
    """All bookkeeping, no switch: the slots stay, the prompt runs at the small micro-batch."""
    model = "qwen3moe"
    server = start(model, PREFILL_MODE="bypass")
    check(server, model, switched=False)
    assert slots_of(server) == [N_SLOTS] and server.counters()["left"] == 1
    assert_sane(server)


@pytest.mark.parametrize("step", ["enter.reserve_prefill_buffers", "leave.refill_slots"])
def test_bypass_with_a_fault_touches_nothing(start, check, step: str) -> None:
    """Undo and retry are bookkeeping, too: slots, their experts and the figures stay."""
    model = "qwen3moe"
    server = start(model, PREFILL_MODE="bypass", FAULT=step)
    check(server, model, switched=False)
    check(server, model, switched=False)
    counters = server.counters()
    assert counters["rolled_back"] == int(step.startswith("enter")) and counters["failed"] == 0
    assert slots_of(server) == [N_SLOTS] and "note" not in experts(server)
    assert {step["bytes"] for step in server.phase()["last_transaction"]["steps"]} == {0}
    assert_sane(server)
