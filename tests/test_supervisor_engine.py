"""The supervisor over the real engine: what a scripted server cannot show."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from fake_world import World, until
from supervised import SMALL, Run

from llama_phase.companions import companions_for
from llama_phase.detached import summary
from llama_phase.kv_companion import KvNote, kv_notes
from llama_phase.server import Server
from llama_phase.settings import Settings
from llama_phase.supervisor_status import SupervisorStatus

pytestmark = pytest.mark.engine
# of the real server; TEST_CYCLES=100 for the long run
CYCLES = int(os.environ.get("TEST_CYCLES", "25"))


def counters(url: str) -> dict[str, int]:
    return httpx.get(f"{url}/phase").json()["counters"]


def test_l7_ready_means_that_a_whole_prefill_went_there_and_back(real: Callable[..., Run]) -> None:
    status = real().until_state("ready", "failed")
    assert status.state == "ready", status.failure
    assert counters(status.url)["entered"] == 1 and counters(status.url)["left"] == 1
    assert status.engine and status.probe_s > 0


def test_l7_phases_off_needs_no_switch(real: Callable[..., Run]) -> None:
    status = real(prefill_mode="off").until_state("ready", "failed")
    assert status.state == "ready" and httpx.get(f"{status.url}/phase").json()["mode"] == "off"


def test_status_says_where_the_kv_is(real: Callable[..., Run], model_path: Callable[[str], Path]) -> None:
    """In host memory, or why not; nothing when nobody asked."""

    def noted(it: Run) -> str:
        assert it.until_state("ready", "failed").state == "ready", it.status.failure
        until(lambda: it.status.notes, "a note")
        (note,) = it.status.notes
        assert f"  {note}" in summary(it.status) and note in it.said
        it.close()
        return note

    note = noted(real(model=model_path("qwen4exp"), kv="host", kv_rows=300))
    assert note == "K/V of 2 layers in host memory, 2 MiB; the device keeps 300 positions of a layer as well"
    assert " stays on CPU: dense attention would read" in noted(real(kv="host"))
    silent = Settings.load(model=model_path("qwen4exp"))
    assert not [one for one in companions_for(silent, SupervisorStatus(), print) if isinstance(one, KvNote)]


def test_kv_notes_of_several_places() -> None:
    def layer(place: str, device: str, gib: int, **more: object) -> dict:
        return {"place": place, "device": device, "bytes": gib << 30, **more}

    first = [layer("host", "CUDA0", 2, rows={"kept": 16384}), layer("host", "CUDA1", 1, rows={"kept": 5000})]
    second = [layer("host", "CUDA1", 1), layer("device", "CUDA1", 1, reason="why"), layer("device", "CUDA1", 1)]
    phase = {"kv": {"contexts": [{"layers": [*first, layer("device", "CUDA1", 1, reason="why")]}, {"layers": second}]}}
    assert list(kv_notes(phase)) == [
        "K/V of 3 layers in host memory, 4.00 GiB; the device keeps 5000 or 16384 positions of a layer as well",
        "K/V of 2 layers stays on CUDA1: why",
    ]
    assert list(kv_notes({"kv": {"contexts": [{"layers": []}]}})) == list(kv_notes({})) == []


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [("enter.reserve_prefill_buffers", 9), ("leave.reserve_decode_buffers:*,leave.retry_decode_buffers:*", 75)],
)
def test_l7_a_transaction_that_fails_is_never_ready(real: Callable[..., Run], fault: str, exit_code: int) -> None:
    it = real(fault=fault)
    error = it.until_over()
    status = it.status
    assert status.state == "failed" and status.failure.kind == "oom_transaction", status.failure
    assert error.exit_code == status.failure.exit_code == exit_code


def test_l1_a_flag_of_no_server_is_named(real: Callable[..., Run]) -> None:
    it = real("--no-such-flag")
    error = it.until_over()
    assert it.status.failure.kind == "bad_flag" and "--no-such-flag" in error.fix
    assert it.status.restarts == 0


def test_an_unreadable_model_is_one(real: Callable[..., Run], world: World) -> None:
    data = bytearray(world.model.read_bytes())
    position = data.index(b"qwen3moe")
    data[position : position + 8] = b"qwen3mOO"
    bad = world.folder / "bad.gguf"
    bad.write_bytes(data)
    it = real(model=bad)
    it.until_over()
    assert it.status.failure.kind == "bad_model", it.status.failure


def test_l12_after_a_change_that_fails_the_last_good_one_answers_as_before(real: Callable[..., Run]) -> None:
    def ask(url: str) -> list[int]:
        body = {"prompt": [100, 200, 300], "n_predict": 8, "temperature": 0, "return_tokens": True}
        return httpx.post(f"{url}/completion", json=body, timeout=60).json()["tokens"]

    it = real(policy={"settled_s": 0.1})
    before = ask(it.until_state("ready").url)
    until(lambda: list((it.folder / "served").glob("*-ok.json")), "noted as good")
    it = real("--no-such-flag")
    status = it.until_state("ready", "failed")
    assert status.state == "ready" and status.rollbacks == 1
    assert ask(status.url) == before


def test_l18_a_killed_server_is_replaced_on_its_port(real: Callable[..., Run]) -> None:
    it = real()
    first = it.until_state("ready")
    os.kill(first.server_pid or 0, signal.SIGKILL)
    until(lambda: it.status.restarts == 1 and it.status.state == "ready", "ready again")
    assert it.status.url == first.url and counters(first.url)["entered"] == 1


def test_requests_that_run_finish_before_a_stop(real: Callable[..., Run]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    it = real(grace_s=60)
    url = it.until_state("ready").url
    body = {"prompt": [100, 200, 300], "n_predict": 1500, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url) as client:
        answer = pool.submit(httpx.post, f"{url}/completion", json=body, timeout=120)
        until(lambda: client.get("/slots").json()[0]["is_processing"], "it runs")
        it.signals.stop = True
        it.until_over()
        assert len(answer.result().json()["tokens"]) == 1500
    assert it.status.state == "stopped"


@pytest.mark.slow
def test_start_and_stop_leak_nothing(
    real: Callable[..., Run], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    it = real()
    it.until_state("ready")
    it.close()  # imports and caches are made by now
    me = psutil.Process()

    def held() -> dict[str, object]:
        return {
            "files": me.num_fds(),
            "children": len(me.children(recursive=True)),
            "temporary": len(list(temporary.iterdir())),
            "listening": sum(c.status == psutil.CONN_LISTEN for c in me.net_connections()),
            "records": len(list((world.folder / "state" / "running").iterdir())),
        }

    sizes = {"ctx": 1024, "ubatch": 32, "prefill_ubatch": 64, "batch": 64}
    settings = Settings.load(model=world.model, port=0, upstream=SMALL, **sizes)
    before, pids = held(), []
    for _ in range(CYCLES):
        with Server(settings) as server:
            pids.append(server.pid)
    assert held() == before
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(list((world.folder / "state" / "log").iterdir())) <= 20


@pytest.mark.slow
def test_restarts_leak_nothing(real: Callable[..., Run]) -> None:
    sizes = {"ctx": 1024, "ubatch": 32, "prefill_ubatch": 64, "batch": 64}
    me = psutil.Process()
    others = {process.pid for process in me.children()}  # servers of other tests
    it = real(policy={"restarts": CYCLES + 5, "delay_cap_s": 0.1}, **sizes)

    def cycle() -> None:
        first = it.until_state("ready")
        os.kill(first.server_pid or 0, signal.SIGKILL)
        until(lambda: it.status.restarts > first.restarts and it.status.state == "ready", "ready again")

    cycle()
    until(lambda: me.num_threads() < 60, "threads of earlier tests ended")
    files, threads = me.num_fds(), me.num_threads()
    for _ in range(max(3, CYCLES // 8)):
        cycle()
    until(lambda: me.num_fds() <= files and me.num_threads() <= threads, f"as before: {files} files, {threads} threads")
    assert len({process.pid for process in me.children()} - others) == 1
