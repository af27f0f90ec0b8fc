"""`up`, `down`, `status`, `logs`, `rollback` and the locks, as a user meets them: real commands, a scripted server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_gguf import write_gguf
from fake_world import SOON_S, World, gone, until

from llama_phase.detached import look, roll_back, start, stop, summary
from llama_phase.errors import AlreadyRunning, LlamaPhaseError, ModelError, PortBusy, UsageError
from llama_phase.holder import Holder, Lock, read_holder
from llama_phase.instance import REQUEST, find_folder, put_request, signal_holder, take_request
from llama_phase.journal import Journal
from llama_phase.port import free_port
from llama_phase.running_servers import birth_of
from llama_phase.settings import Settings
from llama_phase.supervisor_status import SupervisorStatus, read_status, write_status


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "llama_phase.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


def as_typed() -> None:
    """Ctrl-C works, also where the tests run as a background job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Detached:
    """A folder whose supervisor is stopped after the test."""

    def __init__(self, world: World):
        self.world = world
        self.folder = world.folder / "state"

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        return command("up", str(self.world.model), "--port", "0", *words)

    def start(self, *words: str) -> None:
        """`up` without a process of its own, for tests of something else."""
        settings = Settings.load(model=self.world.model, port=0)
        start(settings, [str(self.world.model), "--port", "0", *words], lambda line: None)

    def stop(self, **options: bool) -> bool:
        return stop(self.folder, lambda line: None, **options)

    @property
    def status(self) -> SupervisorStatus:
        return read_status(self.folder) or SupervisorStatus()


@pytest.fixture
def detached(world: World) -> Iterator[Detached]:
    it = Detached(world)
    yield it
    it.stop(at_once=True)
    assert read_holder(it.folder) is None
    assert not it.status.supervisor_pid or gone(it.status.supervisor_pid)


def test_up_status_logs_down(world: World, detached: Detached) -> None:
    done = detached.up()
    assert done.returncode == 0 and "ready: model.gguf at http://127.0.0.1:" in done.stderr, done.stderr
    status = command("status", "--json")
    seen = json.loads(status.stdout)
    assert status.returncode == 0 and seen["state"] == "ready" and seen["server_pid"] == world.child_pid()
    assert "ready: model.gguf" in command("status").stdout
    assert "fake: listening" in command("logs").stdout
    assert "ready: " in command("logs", "--supervisor").stdout
    parent = psutil.Process(seen["supervisor_pid"])
    assert os.getsid(parent.pid) == parent.pid, "closing the terminal does not reach it"
    again = detached.up()
    assert again.returncode == AlreadyRunning.exit_code and str(parent.pid) in again.stderr
    served = command("serve", str(world.model), "--port", "0")
    assert served.returncode == AlreadyRunning.exit_code and str(parent.pid) in served.stderr
    down = command("down")
    assert down.returncode == 0 and "stopped" in down.stderr, down.stderr
    assert gone(parent.pid) and gone(world.child_pid())
    assert "cleaning up before exit" in world.logs(), "asked, not killed"
    after = command("status", "--json")
    assert after.returncode == 1 and json.loads(after.stdout)["state"] == "stopped"
    assert json.loads(after.stdout)["exit_code"] == 143
    assert command("down").returncode == 0 and "nothing runs" in command("down").stderr


def test_up_ends_as_the_supervisor_does_with_its_reason(world: World, detached: Detached) -> None:
    world.set("FAKE_EXIT", "1:error: invalid argument: --no-such-flag")
    done = detached.up()
    assert done.returncode == 9 and "exit code 1" in done.stderr and "--no-such-flag" in done.stderr
    assert "fix: llama-server knows no flag" in done.stderr and "Traceback" not in done.stderr
    status = command("status")
    assert status.returncode == 1 and "failed: model.gguf" in status.stdout and "bad_flag" in status.stdout


def test_up_refuses_a_wrong_setting_before_anything_starts(world: World, detached: Detached) -> None:
    done = detached.up("--prefill-mode", "sometimes")
    assert done.returncode == 2 and not detached.folder.exists()


def test_l18_a_supervisor_that_was_killed_is_told_from_one_that_was_stopped(world: World, detached: Detached) -> None:
    detached.start()
    pid = detached.status.supervisor_pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid) and gone(world.child_pid()), "the server died with its supervisor")
    status = command("status")
    assert status.returncode == 1 and "stopped" in status.stdout and "gone without a word" in status.stdout
    world.dump.unlink()
    detached.start()
    assert detached.status.state == "ready", "and it starts again"


@pytest.mark.parametrize(
    ("moment", "settings"),
    [
        ("loading", {"FAKE_LOAD_S": "600"}),
        ("first prompt", {"FAKE_PROBE": "stuck"}),
        ("waiting", {"FAKE_SIGNAL": "SIGSEGV"}),
        ("stopping", {"FAKE_IGNORE_TERM": "1", "LLAMA_PHASE_GRACE_S": "600"}),
    ],
)
def test_l3_a_supervisor_killed_at_any_moment_leaves_nothing(world: World, moment: str, settings: dict) -> None:
    for name, value in settings.items():
        world.set(name, value)
    folder = world.folder / "state"
    process = world.serve()

    def seen() -> SupervisorStatus:
        return read_status(folder) or SupervisorStatus()

    reached = {
        "loading": lambda: seen().server_pid and world.dump.exists(),
        "first prompt": lambda: seen().load_s is not None,
        "waiting": lambda: seen().restarts >= 1,
        "stopping": lambda: seen().state == "stopping",
    }
    if moment == "stopping":
        until(lambda: seen().state == "ready", "ready")
        process.send_signal(signal.SIGTERM)
    until(reached[moment], moment)
    process.kill()
    process.wait()
    until(lambda: gone(world.child_pid()), "the server is gone")
    after = look(folder)
    assert after is not None and after.state == "stopped" and "gone without a word" in after.notes[-1]
    lock = Lock(folder)
    lock.take("m.gguf", ["127.0.0.1"], 0)
    lock.release()
    assert Journal(folder / "served").good() == []


def test_ctrl_c_in_up_leaves_it_starting(world: World, detached: Detached) -> None:
    world.set("FAKE_LOAD_S", "600")
    line = [sys.executable, "-m", "llama_phase.cli", "up", str(world.model), "--port", "0"]
    with (world.folder / "said").open("w") as out:
        process = subprocess.Popen(line, stderr=out, stdout=out, preexec_fn=as_typed)
    until(lambda: detached.status.server_pid, "loading")
    process.send_signal(signal.SIGINT)
    assert process.wait(SOON_S) == 130
    assert "llama-phase down" in (world.folder / "said").read_text()
    assert read_holder(detached.folder) is not None and detached.status.state == "starting"
    assert detached.stop() and gone(world.child_pid())


def test_down_now_ends_a_stubborn_one(world: World, detached: Detached) -> None:
    world.set("FAKE_IGNORE_TERM", "1")
    detached.start("--grace", "600")
    assert command("down", "--now").returncode == 0
    assert gone(world.child_pid())


def test_rollback_by_hand(world: World, detached: Detached) -> None:
    assert command("rollback").returncode == 1 and "no supervisor was ever started" in command("status").stderr
    detached.start("--ctx", "4096")
    answered = command("rollback")
    assert answered.returncode == 1 and "nothing to go back to" in answered.stderr
    _ask(detached)
    assert detached.stop()
    first = detached.status.configuration
    detached.start("--ctx", "8192")
    _ask(detached)
    listed = command("rollback", "--list")
    assert listed.returncode == 0 and "ctx: 4096 -> 8192" in listed.stdout and first in listed.stdout
    with pytest.raises(LlamaPhaseError, match="no configuration 99"):
        roll_back(detached.folder, 99, print)
    assert command("rollback").returncode == 0
    until(lambda: detached.status.configuration == first and detached.status.state == "ready", "the first is back")
    assert any("ROLLED BACK" in line for line in summary(detached.status))


def test_rollback_to_what_cannot_be_loaded_is_refused_and_what_serves_goes_on(world: World, detached: Detached) -> None:
    detached.start("--ctx", "4096")
    _ask(detached)
    assert detached.stop()
    model = world.model
    world.model = write_gguf(world.folder / "other.gguf")
    detached.start()
    _ask(detached)
    before = detached.status
    for spoil, words in ((lambda: model.write_bytes(model.read_bytes()[:16]), ""), (model.unlink, "no file")):
        spoil()
        answered = command("rollback")
        assert answered.returncode == ModelError.exit_code and model.name in answered.stderr, answered.stderr
        assert words in answered.stderr and "fix: " in answered.stderr
    assert not (detached.folder / REQUEST).exists()
    after = detached.status
    assert (after.state, after.server_pid, after.rollbacks) == ("ready", before.server_pid, 0)


def test_rollback_to_what_does_not_serve_any_more_leads_back(world: World, detached: Detached) -> None:
    """The journal was empty when the one that serves was started first."""
    detached.start("--", "--old")
    _ask(detached)
    assert detached.stop()
    world.set("FAKE_ONLY_IF", "--old")
    world.set("FAKE_EXIT", "1:error: invalid argument: --old")
    detached.start()
    _ask(detached)
    new = detached.status.configuration
    assert command("rollback").returncode == 0
    until(lambda: detached.status.rollbacks == 2 and detached.status.state == "ready", "it serves again")
    assert detached.status.configuration == new and detached.status.rolled_back is None
    assert detached.status.failure is not None and detached.status.failure.kind == "bad_flag"


def _ask(detached: Detached) -> None:
    from llama_phase.client import Client

    with Client(detached.status.url) as client:
        client.completion([1, 2])
    fingerprint = detached.status.configuration
    journal = Journal(detached.folder / "served")
    until(lambda: any(r.configuration.fingerprint == fingerprint for r in journal.good()), "noted as good")


def test_status_watch_ends_with_ctrl_c_and_follows_the_state(world: World, detached: Detached) -> None:
    detached.start()
    with (world.folder / "watched").open("w") as out:
        line = [sys.executable, "-m", "llama_phase.cli", "status", "--watch"]
        process = subprocess.Popen(line, stdout=out, preexec_fn=as_typed)
    try:
        until(lambda: "ready" in (world.folder / "watched").read_text(), "shown")
        assert detached.stop()
        until(lambda: "stopped" in (world.folder / "watched").read_text(), "the change is shown")
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON_S) == 130
    finally:
        process.kill()
        process.wait()


# --- locks ------------------------------------------------------------------------------------------------------------


def test_one_supervisor_per_folder_and_per_address(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    one, same_folder, same_port = Lock(tmp_path / "a"), Lock(tmp_path / "a"), Lock(tmp_path / "b")
    one.take("m.gguf", ["127.0.0.1"], port)
    with pytest.raises(AlreadyRunning) as caught:
        same_folder.take("n.gguf", ["127.0.0.1"], port + 1)
    assert str(os.getpid()) in str(caught.value) and "m.gguf" in str(caught.value)
    with pytest.raises(PortBusy) as busy:
        same_port.take("n.gguf", ["127.0.0.1"], port)
    assert str(os.getpid()) in str(busy.value)
    assert same_port._fd is None, "nothing is kept of what could not be taken whole"
    one.release()
    one.release()
    same_port.take("n.gguf", ["127.0.0.1"], port)
    same_port.release()


def test_whoever_looks_at_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    from threading import Event, Thread

    ended = Event()

    def look() -> None:
        while not ended.is_set():
            read_holder(tmp_path)

    readers = [Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            lock = Lock(tmp_path)
            lock.take("m", [], 0)
            lock.release()
    finally:
        ended.set()
        for reader in readers:
            reader.join()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom llama_phase.holder import Lock\n"
        "lock = Lock(Path(sys.argv[1])); lock.take('m', ['127.0.0.1'], int(sys.argv[2]))\n"
        "print('taken', flush=True); time.sleep(600)\n"
    )
    port = str(free_port("127.0.0.1"))
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), port], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "taken\n"
        holder = read_holder(tmp_path)
        assert holder is not None and holder.pid == process.pid
        with pytest.raises(AlreadyRunning):
            Lock(tmp_path).take("m", [], 0)
    finally:
        process.kill()
        process.wait()
        process.stdout and process.stdout.close()
    assert read_holder(tmp_path) is None
    lock = Lock(tmp_path)
    lock.take("m", ["127.0.0.1"], int(port))
    lock.release()


def test_l4_a_reused_pid_is_not_signalled(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        birth_s = birth_of(process.pid) or 0.0
        assert not signal_holder(Holder(process.pid, birth_s - 5.0), signal.SIGKILL)
        (tmp_path / "lock").write_text(json.dumps({"pid": process.pid, "birth_s": birth_s - 5.0}))
        assert read_holder(tmp_path) is None, "a stale lock file names nobody"
        time.sleep(0.1)
        assert process.poll() is None
        assert signal_holder(Holder(process.pid, birth_s), signal.SIGKILL)
        assert process.wait(SOON_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    assert not signal_holder(Holder(process.pid, birth_s), signal.SIGTERM)


def _name(folder: Path | None) -> str:
    return folder.name if folder else ""


def test_which_supervisor_is_meant(tmp_path: Path) -> None:
    assert find_folder(tmp_path, False, None) is None and find_folder(tmp_path, True, 1) is None
    for name in ("port-1", "port-2"):
        write_status(tmp_path / name, SupervisorStatus(model=name))
    os.utime(tmp_path / "port-1" / "status.json", (2e9, 2e9))
    assert _name(find_folder(tmp_path, False, None)) == "port-1", "none runs: the last one"
    assert _name(find_folder(tmp_path, False, 2)) == "port-2"
    locks = [Lock(tmp_path / name) for name in ("port-1", "port-2")]
    try:
        locks[1].take("m", [], 0)
        assert _name(find_folder(tmp_path, False, None)) == "port-2", "the only one that runs"
        locks[0].take("m", [], 0)
        with pytest.raises(UsageError, match="ports 1, 2"):
            find_folder(tmp_path, False, None)
    finally:
        for lock in locks:
            lock.release()
    write_status(tmp_path, SupervisorStatus())
    assert find_folder(tmp_path, True, 7) == tmp_path


def test_a_request_that_makes_no_sense_is_none_and_a_status_that_does_not_is_said(tmp_path: Path) -> None:
    assert take_request(tmp_path) is None
    put_request(tmp_path, "abc")
    assert take_request(tmp_path) == "abc" and take_request(tmp_path) is None
    (tmp_path / "request").write_bytes(b"\xff\xfe")
    assert take_request(tmp_path) is None and read_status(tmp_path) is None
    for text in ("", "[]", "null", '{"failure": 3}', '{"rolled_back": {"x": 1}}'):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(LlamaPhaseError, match="no whole status"):
            read_status(tmp_path)
    (tmp_path / "status.json").write_text('{"state": "ready", "of_a_later_version": 1}')
    assert read_status(tmp_path) == SupervisorStatus(state="ready")
