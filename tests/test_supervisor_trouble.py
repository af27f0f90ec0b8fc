"""What may go wrong around a supervisor: a full disk, readers that go away, errors nobody foresaw, files of others."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_world import SOON_S, World, gone, until
from rich.console import Console

from llama_phase import attempt, detached, foreground
from llama_phase import holder as holder_module
from llama_phase.companions import PortStandin
from llama_phase.detached import look, start, stop, summary
from llama_phase.errors import LlamaPhaseError, UsageError
from llama_phase.holder import Lock, read_holder
from llama_phase.instance import find_folder, put_request
from llama_phase.log_follow import follow
from llama_phase.lossy_stream import LossyStream
from llama_phase.running_servers import birth_of
from llama_phase.settings import Settings
from llama_phase.supervisor_status import OWN_ERROR, SupervisorStatus, read_status, write_status


def line(*words: str) -> list[str]:
    return [sys.executable, "-m", "llama_phase.cli", *words]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line(*words), capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def folder(world: World) -> Iterator[Path]:
    """The state folder; what runs there is stopped after the test."""
    path = world.folder / "state"
    yield path
    holder = read_holder(path)
    if holder is not None and holder.pid != os.getpid():
        stop(path, say_nothing, at_once=True)


def up(world: World, said: Callable[[str], None] = lambda text: None) -> None:
    start(Settings.load(model=world.model, port=0), [str(world.model), "--port", "0"], said)


def seen(folder: Path) -> SupervisorStatus:
    with contextlib.suppress(LlamaPhaseError):
        return read_status(folder) or SupervisorStatus()
    return SupervisorStatus()


def say_nothing(text: str) -> None:
    pass


# --- lines that nobody takes ------------------------------------------------------------------------------------------


def _no_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("out", [lambda: os.open("/dev/full", os.O_WRONLY), _no_reader], ids=["full", "no reader"])
def test_lines_that_cannot_be_written_stop_nothing(world: World, folder: Path, out: Callable[[], int]) -> None:
    fd = out()
    process = subprocess.Popen(line("serve", str(world.model), "--port", "0"), stdout=fd, stderr=fd)
    os.close(fd)
    world.started.append(process)
    until(lambda: seen(folder).state == "ready" or process.poll() is not None, "ready")
    server = seen(folder).server_pid
    assert server is not None, "it fell over"
    os.kill(server, signal.SIGKILL)
    until(lambda: (seen(folder).restarts and seen(folder).state == "ready") or process.poll() is not None, "again")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 143 and seen(folder).state == "stopped"


def test_a_terminal_that_is_gone_stops_no_live_block() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def isatty(self) -> bool:
            return True

    console = Console(file=Gone(), force_terminal=True)
    with foreground.Status(console) as status:
        status.say("[a line]")
        assert status._live is not None
        status._live.update("block", refresh=True)


def test_what_is_written_in_pieces_arrives_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        LossyStream(file).write("a line with ü\n")
    assert (tmp_path / "out").read_text() == "a line with \\xfc\n"


@pytest.mark.parametrize("words", [["logs"], ["logs", "-f"], ["status", "--watch"]], ids=" ".join)
def test_commands_end_well_when_nobody_reads_on(folder: Path, tmp_path: Path, words: list[str]) -> None:
    log = tmp_path / "log"
    log.write_text("a line\n" * 100000)
    write_status(folder, SupervisorStatus(state="stopped", log=str(log)))
    more = ["-n", "100000"] if words[0] == "logs" else []
    writer = _no_reader()
    try:
        done = subprocess.run(line(*words, *more), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 0 and not done.stderr


# --- errors nobody foresaw --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "loading", "ready", "stopping"])
def test_a_supervisor_that_falls_over_is_failed_and_not_what_it_was(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fall(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    def show(_: object, supervisor: object) -> None:
        if seen(folder).state == "ready":
            if moment == "ready":
                fall()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(foreground.Status, "show", show)
    method = {"before": "start", "loading": "look", "stopping": "stop"}.get(moment)
    if method:
        monkeypatch.setattr(attempt.Attempt, method, fall)
    with pytest.raises(RuntimeError):
        foreground.serve(Settings.load(model=world.model, port=0), Console(file=io.StringIO()))
    status = look(folder)
    assert status is not None and (status.state, status.exit_code, status.server_pid) == ("failed", 1, None)
    assert status.notes[-1] == f"{OWN_ERROR}: RuntimeError: nobody foresaw this"
    shown = command("status")
    assert shown.returncode == 1 and "failed: model.gguf" in shown.stdout and "nobody foresaw" in shown.stdout


@pytest.mark.parametrize("state", ["starting", "ready", "stopping"])
def test_a_status_that_ends_in_the_middle_is_not_believed(tmp_path: Path, state: str) -> None:
    write_status(tmp_path, SupervisorStatus(state=state, exit_code=1, server_pid=1))
    after = look(tmp_path)
    assert after is not None and after.state == "failed" and after.server_pid is None


# --- up and down ------------------------------------------------------------------------------------------------------


def test_up_says_started_once_down_finds_it(world: World, folder: Path) -> None:
    found: list[int | None] = []

    def say(text: str) -> None:
        if "supervisor started" in text:
            holder = read_holder(folder)
            found.append(holder.pid if holder else None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        up(world, say)
    assert found != [None] and stop(folder, say_nothing)
    assert gone(found[0] or 0) and read_holder(folder) is None


def test_ctrl_c_before_it_is_found_leaves_nothing(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(child: subprocess.Popen[bytes], _: Path) -> None:
        started.append(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(detached, "_wait_held", interrupt)
    with pytest.raises(KeyboardInterrupt):
        up(world)
    assert started[0].returncode is not None and not world.dump.exists()


def test_a_signal_between_lock_and_start_stops_it(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Lock.take

    def take_and_hear(lock: Lock, *words: object) -> None:
        take(lock, *words)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Lock, "take", take_and_hear)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens"))
    try:
        assert foreground.serve(Settings.load(model=world.model, port=0), Console(file=io.StringIO())) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not world.dump.exists()


def test_down_now_needs_one_message_only(world: World, folder: Path) -> None:
    """The supervisor sleeps while both would be sent: signals of one number become one."""
    world.set("FAKE_IGNORE_TERM", "1")
    world.set("LLAMA_PHASE_GRACE_S", "600")
    up(world)
    pid = seen(folder).supervisor_pid
    os.kill(pid, signal.SIGSTOP)
    said: list[str] = []
    stopping = threading.Thread(target=lambda: stop(folder, said.append, at_once=True))
    stopping.start()
    until(lambda: said, "sent")
    time.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    stopping.join(SOON_S)
    assert not stopping.is_alive() and gone(pid) and gone(world.child_pid())
    assert (seen(folder).state, seen(folder).exit_code) == ("stopped", 143), "it was not killed"


def test_the_error_of_an_earlier_run_is_not_this_ones(world: World, folder: Path) -> None:
    folder.mkdir()
    (folder / "supervisor.log").write_text("error: of an earlier run\nfix: which was done\n")
    world.set("FAKE_LOAD_S", "600")
    process = subprocess.Popen(line("up", str(world.model), "--port", "0"), stderr=subprocess.PIPE, text=True)
    until(lambda: seen(folder).server_pid, "loading")
    os.kill(seen(folder).supervisor_pid, signal.SIGKILL)
    said = process.communicate(timeout=SOON_S)[1]
    assert process.returncode == 1 and "exit code -9" in said and "earlier run" not in said


# --- what cannot be written -------------------------------------------------------------------------------------------


def test_a_status_that_cannot_be_written_is_told_with_its_path_and_written_later(world: World, folder: Path) -> None:
    blocked = folder / "status.json"
    (blocked / "x").mkdir(parents=True)
    with pytest.raises(LlamaPhaseError) as told:
        up(world)
    assert str(blocked) in str(told.value) and "Is a directory" in str(told.value) and told.value.fix
    until(lambda: "ready: http" in (folder / "supervisor.log").read_text(), "it serves all the same")
    shown = command("status")
    assert shown.returncode == 1 and f"cannot write {blocked}" in shown.stderr and "fix: " in shown.stderr
    assert (folder / "supervisor.log").read_text().count("cannot write") == 1, "said once"
    (blocked / "x").rmdir()
    blocked.rmdir()
    until(lambda: seen(folder).state == "ready", "written again")
    assert command("status").returncode == 0
    (blocked).unlink()
    (blocked / "x").mkdir(parents=True)
    assert stop(folder, say_nothing), "down needs no status"
    assert gone(world.child_pid())


def test_a_living_holder_is_seen_beside_the_status_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(tmp_path, SupervisorStatus(state="stopped", model="old.gguf", supervisor_pid=1, exit_code=0))
    lock = Lock(tmp_path)
    lock.take("new.gguf", [], 0)
    try:
        monkeypatch.setattr(detached, "FIRST_WRITE_S", 1e9)
        status = look(tmp_path)
        assert status is not None
        assert (status.state, status.model, status.supervisor_pid) == ("starting", "new.gguf", os.getpid())
        monkeypatch.setattr(detached, "FIRST_WRITE_S", -1.0)
        with pytest.raises(LlamaPhaseError, match=r"new\.gguf, but cannot write .*status\.json"):
            look(tmp_path)
        lock.mark("No space left on device")
        with pytest.raises(LlamaPhaseError, match="No space left"):
            look(tmp_path)
    finally:
        lock.release()


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_without_room_is_told(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock(folder)
    lock.take("m", [], 0)
    written = (folder / "lock").read_bytes()
    lock.release()
    monkeypatch.setattr(holder_module.os, "pwrite", _full)
    with pytest.raises(LlamaPhaseError, match=r"cannot write in .*No space left"):
        lock.take("other", [], 0)
    assert lock._fd is None and (folder / "lock").read_bytes() == written, "nothing is cut off before it is replaced"
    monkeypatch.setattr(detached.os, "posix_fallocate", _full)
    with pytest.raises(LlamaPhaseError, match=r"cannot write in .*No space left"):
        up(world)
    (folder / "request").mkdir()
    with pytest.raises(LlamaPhaseError, match=r"cannot write .*request"):
        put_request(folder, "abc")


def test_the_mark_in_a_lock_needs_no_more_room(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.take("m.gguf", [], 0)
    size = (tmp_path / "lock").stat().st_size
    for reason in ("No space left on device", ""):
        lock.mark(reason)
        found = read_holder(tmp_path)
        assert found is not None and found.unwritten == reason and (tmp_path / "lock").stat().st_size == size
    lock.release()


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["status.json", "lock"])
@pytest.mark.parametrize("what", ["unreadable", "cut off", "empty"])
def test_what_cannot_be_read_is_not_taken_for_nothing(world: World, folder: Path, name: str, what: str) -> None:
    write_status(folder, SupervisorStatus(state="ready", supervisor_pid=os.getpid()))
    lock, path = Lock(folder), folder / name
    lock.take("m.gguf", [], 0)
    try:
        if what == "unreadable":
            path.rename(folder / "moved")
            path.mkdir()
        else:
            os.truncate(path, 9 if what == "cut off" else 0)
        asked = [("status",), ("rollback", "--list"), *([("down",)] if name == "lock" else [])]
        for words in asked:
            done = command(*words)
            assert done.returncode == 1 and str(path) in done.stderr and "fix: " in done.stderr, done
            assert not done.stdout and "Traceback" not in done.stderr
    finally:
        lock.release()
        if path.is_dir():
            path.rmdir()


def test_a_folder_of_another_user_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "port-1").mkdir()
    write_status(tmp_path / "port-1", SupervisorStatus())
    user = os.geteuid()
    tmp_path.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)
        for explicit, port in ((True, None), (False, None), (False, 1)):
            with pytest.raises(LlamaPhaseError, match="may not read"):
                find_folder(tmp_path, explicit, port)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_a_supervisor_of_another_user_is_not_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "signal_holder", lambda *_: False)
    lock = Lock(tmp_path)
    lock.take("m.gguf", [], 0)
    try:
        with pytest.raises(LlamaPhaseError, match=f"may not stop .*{os.getpid()}"):
            stop(tmp_path, say_nothing)
    finally:
        lock.release()


# --- logs, ports and clocks -------------------------------------------------------------------------------------------


def test_a_last_line_without_its_end_is_shown(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    log.write_text("one\ntwo\nterminate called")
    write_status(tmp_path, SupervisorStatus(state="stopped", log=str(log)))
    assert list(follow(tmp_path, 2, False)) == ["two", "terminate called"]
    lines = follow(tmp_path, 1, True)
    assert [next(lines), next(lines)] == ["two", "terminate called"], "the server is gone: nothing will end it"
    other.write_text("three\n")
    write_status(tmp_path, SupervisorStatus(state="starting", log=str(other)))
    assert [next(lines), next(lines)] == [f"--- {other}", "three"], "and it is not shown twice"


def test_ports_that_are_named_can_be_typed(tmp_path: Path) -> None:
    locks = [Lock(tmp_path / name) for name in ("port-1", "port-any")]
    try:
        for lock in locks:
            lock.take("m", [], 0)
        with pytest.raises(UsageError) as told:
            find_folder(tmp_path, False, None)
        assert "any: --port 0" in told.value.fix
        assert find_folder(tmp_path, False, 0) == tmp_path / "port-any"
    finally:
        for lock in locks:
            lock.release()


def test_setting_the_clock_back_changes_no_time_that_is_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now, offset = time.time(), time.time() - time.monotonic()
    status = SupervisorStatus(
        "starting", now - 5, os.getpid(), birth_of(os.getpid()) or 0.0, clock_offset_s=offset, restart_at_s=now + 40
    )
    monkeypatch.setattr(time, "time", lambda: now - 86400.0)
    assert any(f"waiting {s} s" in summary(status)[0] for s in (38, 39, 40)) and "for 5 s" in summary(status)[1]
    standin = PortStandin()
    standin.waiting(Settings.load(model=world.model, port=0), status)
    try:
        assert 35 <= standin._standin._said[1] <= 40
    finally:
        standin.close()
    shown: list[str] = []
    block = foreground.Status(Console(file=io.StringIO(), force_terminal=True))
    assert block._live is not None
    monkeypatch.setattr(block._live, "update", shown.append)
    block._loading(status)
    assert any(f" {s} s" in shown[0] for s in (38, 39, 40))


def test_a_supervisor_writes_by_which_clock_its_times_go(world: World, folder: Path) -> None:
    up(world)
    written = json.loads((folder / "status.json").read_text())
    assert abs(written["clock_offset_s"] - (time.time() - time.monotonic())) < 5
