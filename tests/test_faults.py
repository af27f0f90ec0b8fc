"""Every step of a transaction made to fail (LLAMA_PHASE_FAULT): the request at hand is answered as documented, and the
next long request gives the tokens of a clean run. Plain "==" of answers: same split (test_tokens.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, Answer, EngineServer, Fleet, both, mtp, steps_of, wait_until

pytestmark = pytest.mark.engine

N_PROMPT = 700
MODELS = ["qwen3moe", "qwen4exp"]
MTP = mtp(3)

RETRY = "leave.retry_decode_buffers"
ENTER, UNDO = steps_of("enter"), steps_of("undo")
LEAVE = [step for step in steps_of("leave") if step != RETRY]
FAILS_FOR_GOOD = f"{LEAVE[-1]},{RETRY}"
EXIT_UNUSABLE = 75


@pytest.fixture(scope="module")
def clean(fleet: Fleet, prompt) -> Callable[..., list[Answer]]:
    """`clean(model, *args)`: stock's answers to the prompt of these tests at decode and at prefill micro-batch."""
    known: dict[tuple[str, ...], list[Answer]] = {}

    def answers(model: str, *args: str) -> list[Answer]:
        key = (model, *args)
        if key not in known:
            servers = [fleet.stock(*key, ubatch=ubatch) for ubatch in (DECODE_UBATCH, PREFILL_UBATCH)]
            known[key] = list(both(*servers, prompt(model, N_PROMPT)))
        return known[key]

    return answers


def held_bytes(server: EngineServer, phase: str) -> int:
    return sum(device["compute_buffer_bytes"] for device in server.phase()["memory"][phase])


def assert_unusable(server: EngineServer, prompt: list[int], reason: str) -> None:
    """503 with the reason, promptly, then exit code 75."""
    begin = time.monotonic()
    response = server.post(prompt)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["type"] == "unavailable_error"
    assert "no decode buffers" in error["message"] and reason in error["message"]
    assert server.wait_exit() == EXIT_UNUSABLE
    assert time.monotonic() - begin < 20
    assert reason in server.log_text()


@pytest.mark.parametrize("step", ENTER)
@pytest.mark.parametrize(("model", "args"), [("qwen3moe", ()), ("qwen4exp", MTP)])
def test_enter_fails(clean, one_server, prompt, model: str, args: tuple[str, ...], step: str) -> None:
    """Rolled back: the prompt runs at the small micro-batch, and the next one switches."""
    tokens = prompt(model, N_PROMPT)
    small, large = clean(model, *args)
    server = one_server(model, *args, FAULT=step)

    assert server.complete(tokens) == small
    state = server.phase()
    assert state["phase"] == "decode"
    assert state["counters"] | {"entered": 0, "left": 0, "rolled_back": 1} == state["counters"]
    assert state["last_transaction"]["outcome"] == "rolled back"
    assert state["last_transaction"]["failed_step"] == step
    assert step in state["last_failure"] and "injected fault" in state["last_failure"]
    assert sum(f"step {step} failed" in line for line in server.log_text().splitlines()) == 1, "one log line names it"

    assert server.complete(tokens) == large
    assert server.counters() == state["counters"] | {"entered": 1, "left": 1, "prompts": 2}


def test_a_later_enter_fails(clean, one_server, prompt) -> None:
    """`:2` is the second run of the step: a clean switch, a rolled back one, a clean one."""
    model = "qwen3moe"
    tokens = prompt(model, N_PROMPT)
    small, large = clean(model)
    server = one_server(model, FAULT="enter.reserve_prefill_buffers:2")
    assert [server.complete(tokens) for _ in range(3)] == [large, small, large]
    assert server.counters() | {"entered": 2, "left": 2, "rolled_back": 1} == server.counters()


def test_a_size_that_always_fails_is_not_tried_for_ever(clean, one_server, prompt) -> None:
    """After three failures in a row prompts are counted as blocked and keep being answered."""
    model = "qwen3moe"
    tokens = prompt(model, N_PROMPT)
    small, _ = clean(model)
    server = one_server(model, FAULT="enter.reserve_prefill_buffers:*")
    assert [server.complete(tokens) for _ in range(5)] == [small] * 5
    counters = server.counters()
    assert (counters["rolled_back"], counters["blocked"], counters["entered"]) == (3, 2, 0)
    assert server.log_text().count("not tried again until a reset") == 1


@pytest.mark.parametrize("step", LEAVE)
@pytest.mark.parametrize(("model", "args"), [("qwen3moe", ()), ("qwen4exp", MTP)])
def test_leave_fails_once(
    fleet: Fleet, clean, one_server, prompt, model: str, args: tuple[str, ...], step: str
) -> None:
    """The retry gets the decode buffers: nothing is lost, not even this request, and decode memory is what it was."""
    tokens = prompt(model, N_PROMPT)
    _, large = clean(model, *args)
    server = one_server(model, *args, FAULT=step)

    answers = [server.complete(tokens) for _ in range(2)]
    assert answers == [large, large]
    counters = server.counters()
    assert (counters["entered"], counters["left"], counters["rolled_back"], counters["failed"]) == (2, 2, 0, 0)
    assert f"step {step} failed, retrying" in server.log_text()
    undisturbed = fleet.phase(model, *args)
    for one in (server, undisturbed):
        one.complete(tokens, n=1)  # no graph of another shape is kept behind it
    assert held_bytes(server, "decode") == held_bytes(undisturbed, "decode")


@pytest.mark.parametrize("step", LEAVE)
def test_leave_fails_for_good(one_server, prompt, step: str) -> None:
    """503 with the reason and exit code 75, never a server that limps on."""
    model = "qwen3moe"
    server = one_server(model, FAULT=f"{step},{RETRY}")
    assert_unusable(server, prompt(model, N_PROMPT), RETRY)


def test_leave_fails_for_good_with_draft_and_two_slots(one_server, prompt) -> None:
    """All requests in progress get the answer, and joined contexts can be destroyed."""
    model = "qwen4exp"
    server = one_server(model, *MTP, sizes={"parallel": 2, "ctx": 4096}, FAULT=FAILS_FOR_GOOD)
    with server.stream(prompt(model, 100), n=1500, n_probs=0) as pieces:
        next(pieces)
        assert_unusable(server, prompt(model, N_PROMPT, seed=2), RETRY)
        last = list(pieces)
    assert not any(piece.get("stop") for piece in last), "cut off, not ended as if complete"


def test_leave_fails_for_good_with_a_request_waiting(one_server, prompt) -> None:
    """A request that has no slot yet gets the same answer, and the process ends although a client stays connected."""
    model = "qwen4exp"
    server = one_server(model, FAULT=FAILS_FOR_GOOD)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, prompt(model, 3500))
        wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
        waiting = server.http.post("/completion", json=server.request(prompt(model, 40)))
        assert (first.result().status_code, waiting.status_code) == (503, 503)
    assert server.wait_exit() == EXIT_UNUSABLE


@pytest.mark.parametrize("step", UNDO)
def test_roll_back_fails(one_server, prompt, step: str) -> None:
    """Nothing is known about the buffers: 503 with the reason and exit code 75."""
    model = "qwen3moe"
    server = one_server(model, FAULT=f"{ENTER[-1]},{step}")
    assert_unusable(server, prompt(model, N_PROMPT), step)


def test_leave_after_a_cancel_fails_for_good(one_server, prompt) -> None:
    """Nobody is there to get a 503, the process ends with 75 all the same."""
    model = "qwen4exp"
    server = one_server(model, sizes={"ctx": 8192}, FAULT=FAILS_FOR_GOOD)
    with server.stream(prompt(model, 7000)):
        wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
    assert server.wait_exit() == EXIT_UNUSABLE


@pytest.mark.parametrize("model", MODELS)
def test_buffers_of_the_phase_not_in_use_are_freed(one_server, prompt, model: str) -> None:
    """The bytes of the steps add up: what is dropped is what was held, and decode memory is afterwards what it was."""
    server = one_server(model, "-lv", "4", sizes={"ctx": 8192}, LOG="debug")
    with server.stream(prompt(model, 7000)):
        entered = wait_until(lambda: (state := server.phase())["phase"] == "prefill" and state, "in the prefill phase")
    left = wait_until(lambda: (state := server.phase())["phase"] == "decode" and state, "back in the decode phase")

    bytes_of = {step["step"]: step["bytes"] for state in (entered, left) for step in state["last_transaction"]["steps"]}
    decode, prefill = held_bytes(server, "decode"), held_bytes(server, "prefill")
    assert 0 < decode < prefill
    assert bytes_of["enter.drop_decode_buffers"] == -decode
    assert bytes_of["enter.reserve_prefill_buffers"] == prefill
    assert bytes_of["leave.drop_prefill_buffers"] == -prefill
    assert bytes_of["leave.reserve_decode_buffers"] == decode
    assert entered["memory"]["decode"] == left["memory"]["decode"]
    assert server.log_text().count("llama-phase: step ") == len(ENTER + LEAVE), "debug logs every step"


def test_memory_comes_back_and_nothing_grows(one_server, prompt) -> None:
    """Resident memory falls when the phase is left; 30 switches leave neither memory nor descriptors behind."""
    model = "qwen3moe"
    server = one_server(model, "--ctx-checkpoints", "0", sizes={"batch": 2048}, prefill_ubatch=2048)
    tokens = prompt(model, 2048)
    with server.stream(tokens, n=200) as pieces:
        wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
        in_prefill = 0
        while server.phase()["phase"] == "prefill":
            in_prefill = max(in_prefill, server.rss_bytes())
        next(pieces)
        freed = in_prefill - server.rss_bytes()
    difference = held_bytes(server, "prefill") - held_bytes(server, "decode")
    assert freed > 0.5 * difference, f"{freed >> 20} MiB came back, the buffers differ by {difference >> 20} MiB"

    short = prompt(model, 300, seed=3)
    seen = []
    for _ in range(30):
        server.complete(short, n=1)
        seen.append((server.rss_bytes(), server.n_descriptors()))
    assert server.counters()["left"] == 31
    assert seen[-1][0] <= seen[5][0] + 8 * 2**20, f"resident MiB: {[rss >> 20 for rss, _ in seen]}"
    assert seen[-1][1] <= seen[5][1], f"descriptors: {[n for _, n in seen]}"


def test_stop_in_the_prefill_phase(one_server, prompt) -> None:
    """SIGTERM in the middle of a long prompt, whose client then goes away (stock waits for that, too): a clean exit."""
    model = "qwen4exp"
    server = one_server(model, sizes={"ctx": 8192})
    with server.stream(prompt(model, 7000)):
        wait_until(lambda: server.phase()["phase"] == "prefill", "in the prefill phase")
        server.process.terminate()
        wait_until(lambda: "cleaning up" in server.log_text(), "the loop has ended")
    assert server.wait_exit() == 0
