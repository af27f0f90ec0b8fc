"""The supervisor over a scripted server: readiness, restarts, rollback, hangs, stopping. In this process, so that a
test costs a fake server's start and no more; the commands themselves are in test_detached.py.

L numbers are symptoms other launchers were seen to have; each test is named after the one it rules out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fake_world import World, gone, until
from sparse_gguf import write_flash_next
from supervised import Run

from llama_phase import plan_check
from llama_phase.errors import EngineUnusable, ServerCrash, ServerStartError
from llama_phase.given_machine import with_given
from llama_phase.hardware import Machine
from llama_phase.journal import Journal
from llama_phase.supervisor_status import SupervisorStatus


@pytest.fixture
def run(world: World) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**options: object) -> Run:
        for old in runs:
            old.close()
        runs.append(Run(world, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for item in runs:
        item.close()


def starts(world: World) -> list[list[str]]:
    path = world.folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- readiness --------------------------------------------------------------------------------------------------------


def test_l7_ready_comes_after_a_prompt_of_a_whole_micro_batch(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_LOAD_S", "0.2")
    status = run().until_state("ready", "failed")
    assert status.state == "ready" and status.load_s is not None and status.probe_s is not None
    assert httpx.get(f"{status.url}/phase").json()["counters"]["entered"] == 3, "the first prompt went through"


@pytest.mark.parametrize(
    ("probe", "kind", "words"),
    [
        ("rolled_back", "oom_transaction", "300 MiB short on CUDA0"),
        ("refused", "probe", "failed to decode"),
        ("empty", "probe", "without a token"),
        ("odd", "probe", "make no sense"),
        ("75", "oom_transaction", "decode buffers"),
        ("1", "exit", "exit code 1"),
    ],
)
def test_l7_a_server_whose_first_prompt_fails_is_never_ready(
    world: World, run: Callable[..., Run], probe: str, kind: str, words: str
) -> None:
    world.set("FAKE_PROBE", probe)
    it = run()
    error = it.until_over()
    status = it.status
    assert status.state == "failed" and status.failure is not None and status.failure.kind == kind
    assert words in str(error) and isinstance(error, EngineUnusable if probe == "75" else ServerStartError)
    assert not any("ready" in line for line in it.said) and Journal(it.folder / "served").good() == []
    assert gone(world.child_pid())


def test_phases_off_the_first_prompt_is_one_micro_batch() -> None:
    from llama_phase.readiness import plan_probe

    on = {"mode": "transaction", "ubatch": {"prefill": 2048}, "min_tokens": 1024}
    assert plan_probe(None, 512, None).n_tokens >= 512 and not plan_probe(None, 512, None).switches
    assert plan_probe({"mode": "off"}, 512, 4096).n_tokens >= 512
    assert plan_probe(on, 512, 8192).n_tokens >= 2048 and plan_probe(on, 512, 8192).switches
    assert plan_probe(on | {"min_tokens": 5000}, 512, 8192).n_tokens >= 5000
    small = plan_probe(on, 512, 1000)
    assert small.n_tokens < 1000 and not small.switches, "what cannot be asked is not expected"
    assert plan_probe(on, 512, 4).n_tokens == 1


# --- crashes and restarts ---------------------------------------------------------------------------------------------


def test_l1_a_bad_flag_is_not_tried_again(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_STARTS", str(world.folder / "starts"))
    world.set("FAKE_EXIT", "1:error: invalid argument: --no-such-flag")
    it = run()
    error = it.until_over()
    assert isinstance(error, ServerStartError) and "--no-such-flag" in error.fix
    assert len(starts(world)) == 1 and it.status.failure.kind == "bad_flag"


def test_l18_a_kill_is_told_and_another_server_follows(world: World, run: Callable[..., Run]) -> None:
    it = run()
    first = it.until_state("ready")
    os.kill(first.server_pid or 0, signal.SIGKILL)
    until(lambda: it.status.restarts == 1 and it.status.state == "ready", "ready again")
    status = it.status
    assert status.server_pid != first.server_pid and status.url == first.url, "on the same port"
    failure = status.failure
    assert (failure.kind, failure.returncode, failure.was_ready) == ("killed", -signal.SIGKILL, True)
    assert failure.log == first.log and failure.log_lines and abs(failure.at_s - time.time()) < 60
    assert status.restarts_by_reason == {"killed": 1}


def test_l12_a_server_that_keeps_crashing_is_given_up(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_STARTS", str(world.folder / "starts"))
    world.set("FAKE_EXIT_AFTER", "1")
    it = run()
    error = it.until_over()
    assert isinstance(error, ServerCrash) and len(starts(world)) == 3
    assert it.status.state == "failed" and it.status.restarts == 2


def test_memory_that_ran_out_while_loading_is_told_from_other_ends(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_EXIT", "1:ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory")
    it = run()
    assert "less memory" in it.until_over().fix and it.status.failure.kind == "oom_load"


def test_l15_a_busy_server_without_progress_is_stopped_and_its_state_kept(
    world: World, run: Callable[..., Run]
) -> None:
    world.set("FAKE_STUCK_AFTER", "0.5")
    it = run(stall_s=1)
    first = it.until_state("ready")
    until(lambda: it.status.restarts == 1, "stopped as hanging")
    assert it.status.failure.kind == "hang" and "no progress" in it.status.failure.text
    assert gone(first.server_pid or 0)
    dump = json.loads(next(it.folder.glob("hang-*.json")).read_text())
    assert dump["pid"] == first.server_pid and dump["threads"] and dump["beat"]["busy"] is True


def test_a_first_prompt_that_never_ends_is_a_hang_too(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_PROBE", "stuck")
    it = run(stall_s=1, policy={"restarts": 0})
    assert "no progress" in str(it.until_over()) and it.status.failure.kind == "hang"


def test_slots_of_another_shape_are_no_hang(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_ODD_SLOTS", "1")
    it = run(stall_s=1)
    it.until_state("ready")
    time.sleep(5.0)  # beyond what a hang takes
    assert it.status.state == "ready" and it.status.restarts == 0


def test_an_api_key_that_cannot_be_read_is_said_before_the_start(world: World, run: Callable[..., Run]) -> None:
    it = run(upstream=("--api-key-file", str(world.folder / "none")))
    assert "cannot read the API key file" in str(it.until_over()) and not world.dump.exists()


def test_l15_a_long_answer_that_makes_progress_is_left_alone() -> None:
    from llama_phase.hang_watch import WEAK, Beat, HangWatch, beat_of
    from llama_phase.stall_watch import Vitals

    def slot(n_prompt: int, n_decoded: int, busy: bool = True) -> list[dict]:
        return [
            {
                "id_task": 1,
                "is_processing": busy,
                "n_prompt_tokens_processed": n_prompt,
                "next_token": [{"n_decoded": n_decoded}],
            }
        ]

    watch = HangWatch(0.0, 300.0)
    for minute in range(600):  # a piece of a prompt every four minutes, and nothing else to be seen
        now_s = 60.0 * minute
        assert watch.stuck_s(now_s, Vitals(), beat_of(slot(2048 * (minute // 4), 0), minute)) is None
    stuck = HangWatch(0.0, 300.0)
    seen = [stuck.stuck_s(float(s), Vitals(), beat_of(slot(5, 5), s)) for s in range(1, 400)]
    assert seen[290] is None and seen[320] is not None
    spinning = HangWatch(0.0, 300.0)  # processor time alone: WEAK times the limit
    seen = [spinning.stuck_s(float(s), Vitals(cpu_s=float(s)), beat_of(slot(5, 5), s)) for s in range(1, 1400)]
    assert all(item is None for item in seen[: int(WEAK * 300) - 10]) and seen[-1] is not None
    idle = HangWatch(0.0, 300.0)
    assert all(idle.stuck_s(float(s), Vitals(), beat_of(slot(0, 0, busy=False), s)) is None for s in range(2000))
    silent = HangWatch(0.0, 300.0)
    assert silent.stuck_s(1.0, Vitals(), Beat()) is None and silent.stuck_s(400.0, Vitals(), Beat()) is not None


# --- rollback ---------------------------------------------------------------------------------------------------------


def served(run: Callable[..., Run], **options: object) -> Run:
    """A run whose configuration served and was noted; it was stopped again."""
    it = run(**options)
    it.until_state("ready")
    until(lambda: Journal(it.folder / "served").good(), "noted as good")
    it.close()
    return it


def test_l12_a_changed_configuration_that_fails_gives_way_to_the_one_that_served(
    world: World, run: Callable[..., Run]
) -> None:
    served(run, ctx=4096)
    world.set("FAKE_STARTS", str(world.folder / "starts"))
    world.set("FAKE_ONLY_IF", "--new")
    world.set("FAKE_EXIT", "1:error: invalid argument: --new")
    it = run(ctx=8192, upstream=("--new",))
    status = it.until_state("ready", "failed")
    assert status.state == "ready" and status.rollbacks == 1
    assert "invalid argument" in "".join(status.failure.log_lines) and status.failure.kind == "bad_flag"
    assert status.rolled_back.failed != status.rolled_back.serving == status.configuration
    first, second = starts(world)
    assert "--new" in first and "--new" not in second and second[second.index("-c") + 1] == "4096"
    assert any("going back" in line for line in it.said) and any("ctx: 8192 -> 4096" in line for line in it.said)


def test_the_breaker_of_a_changed_configuration_leads_back_too(world: World, run: Callable[..., Run]) -> None:
    served(run)
    world.set("FAKE_ONLY_IF", "--new")
    world.set("FAKE_EXIT_AFTER", "1")
    it = run(upstream=("--new",), policy={"settled_s": 60, "restarts": 1})
    until(lambda: it.status.rollbacks == 1 and it.status.state == "ready", "rolled back and ready")
    assert it.status.restarts == 1 and it.status.failure.kind == "exit"


def test_slots_that_became_a_number_stay_one_and_what_is_journalled_is_auto(
    world: World, run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a draft from a file of its own: through a restart, although nothing is free then, and a rollback."""
    monkeypatch.setattr(plan_check, "probe", lambda: with_given(Machine(), vram="24", ram="192"))
    draft = str(write_flash_next(tmp_path, trunk=False))
    flags = ("-ngl", "99", "--cpu-moe", "-md", draft)
    given = {"model": write_flash_next(tmp_path), "ctx": 4096, "expert_slots": "auto", "mtp": "auto"}
    it = run(**given, upstream=flags)
    first = it.until_state("ready", "failed")

    def slots(status: SupervisorStatus) -> str:
        until(lambda: world.child_pid() == status.server_pid, "the server says what it got")
        return str(world.child()["environment"]["LLAMA_PHASE_EXPERT_SLOTS"])  # type: ignore[index]

    n = slots(first)
    line = f"slots: {n}, so that the draft from {Path(draft).name} fits"
    assert int(n) >= 80 and line in it.said and list(first.notes)[:1] == [line]
    until(lambda: Journal(it.folder / "served").good(), "noted as good")
    assert [record.configuration.settings["expert_slots"] for record in Journal(it.folder / "served").good()] == [
        "auto"
    ]

    monkeypatch.setattr(plan_check, "probe", lambda: with_given(Machine(), vram="1", ram="192"))
    os.kill(first.server_pid or 0, signal.SIGKILL)
    until(lambda: it.status.restarts == 1 and it.status.state == "ready", "ready again")
    assert slots(it.status) == n and list(it.status.notes)[:1] == [line]

    monkeypatch.setattr(plan_check, "probe", lambda: with_given(Machine(), vram="24", ram="192"))
    world.set("FAKE_ONLY_IF", "--new")
    world.set("FAKE_EXIT", "1:error: invalid argument: --new")
    it = run(**given | {"expert_slots": 90}, upstream=(*flags, "--new"))
    status = it.until_state("ready", "failed")
    assert status.state == "ready" and status.rollbacks == 1 and status.configuration == first.configuration
    assert slots(status) == n and list(status.notes)[:1] == [line]


def test_two_bad_configurations_end_in_an_error(world: World, run: Callable[..., Run]) -> None:
    served(run)
    world.set("FAKE_STARTS", str(world.folder / "starts"))
    world.set("FAKE_EXIT", "1:error: invalid argument: --anything")
    it = run(upstream=("--new",))
    assert isinstance(it.until_over(), ServerStartError) and len(starts(world)) == 2
    assert it.status.state == "failed" and it.status.rollbacks == 1


def test_a_model_that_is_gone_gives_way_to_the_one_that_served(world: World, run: Callable[..., Run]) -> None:
    served(run)
    status = run(model=world.folder / "other.gguf").until_state("ready", "failed")
    assert status.state == "ready" and status.model == world.model.name
    assert status.failure.kind == "missing_file" and "other.gguf" in status.failure.text


def test_by_hand_an_earlier_configuration_is_served(world: World, run: Callable[..., Run]) -> None:
    old = served(run, ctx=4096).status.configuration
    it = run(ctx=8192)
    new = it.until_state("ready")
    it.signals.change = old
    until(lambda: it.status.configuration == old and it.status.state == "ready", "the earlier one is ready")
    assert it.status.rolled_back.by_hand and gone(new.server_pid or 0)
    it.signals.change = "no-such"
    until(lambda: any("no configuration no-such" in line for line in it.said), "refused")
    assert it.status.state == "ready"


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_running_requests_finish_before_the_server_is_stopped(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_ANSWER_S", "1.5")
    it = run(grace_s=20)
    url = it.until_state("ready").url
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/completion", json={"prompt": [1]}, timeout=30).status_code)
    )
    asking.start()
    until(lambda: httpx.get(f"{url}/slots").json()[0]["is_processing"], "the request runs")
    it.signals.stop = True
    it.until_over()
    asking.join()
    assert answers == [200] and it.status.state == "stopped"


def test_an_endless_request_does_not_keep_it_beyond_the_grace_time(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_STUCK_AFTER", "0")
    it = run(grace_s=1)
    pid = it.until_state("ready").server_pid
    it.signals.stop = True
    it.until_over()
    assert gone(pid or 0) and it.status.state == "stopped"


def test_l2_a_stop_while_waiting_for_the_next_attempt_ends_it(world: World, run: Callable[..., Run]) -> None:
    world.set("FAKE_SIGNAL", "SIGSEGV")
    it = run(policy={"delay_s": 600.0, "delay_cap_s": 600.0})
    until(lambda: it.status.restart_at_s, "waiting")
    it.signals.stop = True
    it.until_over()
    assert it.status.state == "stopped"


def test_a_full_disk_stops_nothing_that_serves(world: World, run: Callable[..., Run], monkeypatch) -> None:
    import llama_phase.durable_file as durable_file
    import llama_phase.supervisor as supervisor

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    it = run(policy={"settled_s": 1.0})
    it.until_state("ready")
    monkeypatch.setattr(supervisor, "write_status", full)
    monkeypatch.setattr(durable_file.RealDisk, "create", full)
    until(lambda: any("cannot write the journal" in line for line in it.said), "said")
    assert it.thread.is_alive() and it.supervisor.status.state == "ready"


def test_setting_the_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_phase.supervisor import steady_clock

    clock = steady_clock()
    before = clock()
    assert abs(before - time.time()) < 1
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock() < before + 5


def test_the_status_file_is_whole_at_any_moment(world: World, run: Callable[..., Run]) -> None:
    it = run()
    seen = set()
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s and it.status.state != "ready":
        path = it.folder / "status.json"
        if path.exists():
            seen.add(SupervisorStatus.from_dict(json.loads(path.read_text())).state)
    assert it.until_state("ready").to_dict() == json.loads((it.folder / "status.json").read_text())
    assert seen <= {"stopped", "starting", "ready"}
    assert (Path(it.folder) / "status.json").stat().st_mode & 0o777 == 0o600


# --- what goes along --------------------------------------------------------------------------------------------------


def test_requests_between_two_servers_are_answered_with_the_reason(world: World, run: Callable[..., Run]) -> None:
    it = run(policy={"delay_s": 600.0, "delay_cap_s": 600.0})
    first = it.until_state("ready")
    os.kill(first.server_pid or 0, signal.SIGKILL)
    until(lambda: it.status.restart_at_s, "waiting")
    answer = httpx.post(f"{first.url}/completion", json={"prompt": "x"})
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 60
    assert "killed" in answer.json()["error"]["message"]
    it.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first.url}/health")


def test_the_stand_in_makes_way_for_the_next_server(world: World, run: Callable[..., Run]) -> None:
    it = run(policy={"delay_s": 1.0})
    first = it.until_state("ready")
    os.kill(first.server_pid or 0, signal.SIGKILL)
    seen = set()
    end_s = time.monotonic() + 30
    while 200 not in seen and time.monotonic() < end_s:
        try:
            seen.add(httpx.get(f"{first.url}/health").status_code if it.status.restarts else 0)
        except httpx.TransportError:
            seen.add(0)
    assert {503, 200} <= seen
    assert it.until_state("ready").failure.kind == "killed"


def test_metrics_tell_of_restarts_and_rollbacks_also_while_the_server_is_down(
    world: World, run: Callable[..., Run]
) -> None:
    from llama_phase.client import parse_metrics
    from llama_phase.port import free_port

    port = free_port("127.0.0.1")
    it = run(metrics_port=port, policy={"delay_s": 600.0, "delay_cap_s": 600.0})

    def metrics() -> dict[str, float]:
        return parse_metrics(httpx.get(f"http://127.0.0.1:{port}/metrics").text)

    first = it.until_state("ready")
    until(lambda: metrics().get('llama_phase_supervisor_state{state="ready"}') == 1, "ready")
    assert metrics()["llamacpp:requests_processing"] == 1, "the server's own are merged in"
    os.kill(first.server_pid or 0, signal.SIGKILL)
    until(lambda: metrics().get('llama_phase_supervisor_state{state="starting"}') == 1, "down")
    assert metrics()['llama_phase_supervisor_restarts_by_reason_total{kind="killed"}'] == 1
    it.close()
    with pytest.raises(httpx.ConnectError):
        metrics()


def test_the_service_manager_hears_of_ready_after_the_first_prompt(
    world: World, run: Callable[..., Run], tmp_path: Path
) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(0.2)
        world.set("NOTIFY_SOCKET", str(tmp_path / "notify"))
        world.set("FAKE_LOAD_S", "0.3")
        it, heard = run(), []

        def listen() -> list[str]:
            with contextlib.suppress(TimeoutError):
                heard.append(manager.recv(4096).decode())
            return heard

        until(lambda: any("READY=1" in text for text in listen()), "told")
        assert it.status.state == "ready" and "READY=1" not in heard[0] and "loading" in heard[0]
        it.signals.stop = True
        until(lambda: any("STOPPING=1" in text for text in listen()), "told of the end")
        it.until_over()


def test_a_metrics_port_that_is_taken_is_said_before_anything_starts(world: World) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        world.set("LLAMA_PHASE_METRICS_PORT", str(holder.getsockname()[1]))
        assert world.serve().wait(30) == 8
    assert not world.dump.exists()


def test_what_speculation_does_otherwise_than_it_reads_is_said_at_each_start(
    world: World, run: Callable[..., Run]
) -> None:
    started = run(upstream=("-np", "1"), spec="ngram-mod", expert_slots=128)
    status = started.until_state("ready", "failed")
    assert [note for note in status.notes if "up to 65 tokens are verified at once" in note], started.said
