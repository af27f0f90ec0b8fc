"""The service manager is told the truth, and the unit is one that systemd reads back as it was meant."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from llama_phase.env import child_environment
from llama_phase.errors import (
    AlreadyRunning,
    EngineUnusable,
    MissingPrerequisite,
    ModelError,
    PortBusy,
    ServerCrash,
    ServerStartError,
    UsageError,
)
from llama_phase.exit_meaning import ENGINE_REFUSED_ENVIRONMENT
from llama_phase.settings import UPSTREAM_ENVIRONMENT, Settings
from llama_phase.systemd import Notifier, unit_text, watchdog_period_s

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LLAMA_", "GGML_", "NOTIFY_", "WATCHDOG_")):
            monkeypatch.delenv(name)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """A fake service manager: its NOTIFY_SOCKET, and the messages that have come."""
    address = f"@llama-phase-{uuid.uuid4().hex}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + address[1:] if address.startswith("@") else address)
        receiver.setblocking(False)

        def received() -> list[str]:
            messages = []
            while True:
                try:
                    messages.append(receiver.recv(4096).decode())
                except BlockingIOError:
                    return messages

        yield address, received


def test_a_life_as_the_manager_sees_it(manager) -> None:
    address, received = manager
    notifier = Notifier.of({"NOTIFY_SOCKET": address})
    notifier.status("loading m.gguf")
    notifier.status("loading m.gguf")
    notifier.ready("serving on http://127.0.0.1:8080")
    notifier.status("restarting:\n signal SIGSEGV")
    notifier.ready("serving again")
    notifier.stopping()
    assert received() == [
        "STATUS=loading m.gguf",
        "READY=1\nSTATUS=serving on http://127.0.0.1:8080",
        "STATUS=restarting: signal SIGSEGV",
        "STATUS=serving again",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_the_watchdog_is_fed_at_half_its_time_and_only_while_healthy(manager) -> None:
    address, received = manager
    notifier = Notifier.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())})
    fed = [now for now in range(0, 60) if notifier.beat(float(now), healthy=not 15 <= now < 45)]
    assert fed == [0, 10, 45, 55]
    assert received() == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize(
    ("environment", "period"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_whose_watchdog(environment: dict[str, str], period: float | None) -> None:
    assert watchdog_period_s(environment, 7) == period


def test_without_a_manager_or_with_one_that_went_away_nothing_happens(tmp_path: Path) -> None:
    for address in ("", "relative", str(tmp_path / "gone"), "@llama-phase-gone"):
        notifier = Notifier.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
        notifier.ready()
        notifier.beat(1.0, healthy=True)
        notifier.stopping()


def test_the_server_does_not_inherit_the_managers_socket() -> None:
    base = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    assert child_environment(Settings.load(model="m", prefill_mode="off"), base) == {"PATH": "/bin"}


def test_systemd_starts_nothing_again_that_the_supervisor_has_given_up() -> None:
    text = unit_text(["x"], folder=Path("/"), description="d", environment={}, grace_s=10)
    line = next(line for line in text.splitlines() if line.startswith("RestartPreventExitStatus="))
    given_up = {int(code) for code in line.partition("=")[2].split()}
    ours = (UsageError, MissingPrerequisite, ModelError, PortBusy, ServerStartError, ServerCrash, AlreadyRunning)
    assert {error.exit_code for error in (*ours, EngineUnusable)} | {ENGINE_REFUSED_ENVIRONMENT} == given_up
    documented = (ROOT / "docs" / "exit-codes.md").read_text()
    assert all(f"| {code} |" in documented for code in given_up)


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llama_phase.cli", "systemd", "install", *words]
    base = os.environ | {"XDG_CONFIG_HOME": str(cwd / "config")}
    return subprocess.run(command, cwd=cwd, env=base | environment, capture_output=True, text=True, check=False)


def test_install_writes_a_unit_that_systemd_accepts(tmp_path: Path) -> None:
    serve = ["--port", "9", "my model.gguf", "--", "-ngl", "99", "--alias", '50% "off" $HOME \\']
    done = run("--user", "--", *serve, cwd=tmp_path, LLAMA_PHASE_CTX="4096")
    assert done.returncode == 0 and "systemctl --user" in done.stdout, done.stderr
    path = tmp_path / "config" / "systemd" / "user" / "llama-phase.service"
    assert str(path) in done.stdout
    text = path.read_text()
    for line in (
        f'ExecStart={sys.executable} -m llama_phase.cli serve --port 9 "my model.gguf" -- -ngl 99 --alias '
        '"50%% \\"off\\" $$HOME \\\\"',
        f"WorkingDirectory={tmp_path}",
        "Environment=LLAMA_PHASE_CTX=4096",
        "Type=notify",
        "Restart=on-failure",
        "WatchdogSec=60",
    ):
        assert line in text.splitlines(), (line, text)
    assert "replaced" in run("--user", "--", "other.gguf", cwd=tmp_path).stdout
    if shutil.which("systemd-analyze"):
        path.write_text(text)
        command = ["systemd-analyze", "verify", "--user", "--man=no", str(path)]
        verified = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        assert "llama-phase.service" not in verified.stderr, verified.stderr


@pytest.mark.parametrize("field", sorted(UPSTREAM_ENVIRONMENT))
def test_what_the_settings_were_taken_from_is_in_the_unit_or_refused(tmp_path: Path, field: str) -> None:
    """A service does not have the environment of the shell that wrote its unit."""
    name, value = UPSTREAM_ENVIRONMENT[field], {"model": "m.gguf", "host": "::1"}.get(field, "4096")
    model = [] if field == "model" else ["--", "m.gguf"]
    done = run("--print", *model, cwd=tmp_path, **{name: value})
    if Settings.model_fields[field].annotation == SecretStr | None:
        assert done.returncode == 2 and name in done.stderr
    else:
        assert done.returncode == 0 and f"Environment={name}={value}" in done.stdout.splitlines(), done.stderr


def test_what_decides_how_the_engine_runs_is_in_the_unit(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    given = {
        "LLAMA_PHASE_PREFILL_MIN_TOKENS": "100",
        "LLAMA_ARG_N_GPU_LAYERS": "99",
        "LLAMA_ARG_SSL_KEY_FILE": "/k.pem",
        "GGML_CUDA_P2P": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_NUM_THREADS": "4",
        "HIP_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/opt/cuda/lib64",
    }
    not_taken = {
        "LLAMA_API_KEY": "s3cret",
        "LLAMA_ARG_PORT": "7",
        "LLAMA_TRACE": "0",
        "LLAMA_PHASE_CTX": "",
        "EDITOR": "vi",
    }
    words = ["--print", "--", "m.gguf", "--port", "9", "--api-key-file", str(key)]
    done = run(*words, cwd=tmp_path, **given, **not_taken)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(f"Environment={name}={value}" in lines for name, value in given.items()), done.stdout
    assert not any(f"{name}=" in done.stdout for name in not_taken) and "s3cret" not in done.stdout


def test_print_writes_nothing(tmp_path: Path) -> None:
    done = run("--print", "--", "m.gguf", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("[Unit]")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--", "m.gguf"], {}, "--user"),
        (["--user"], {}, "model is not given"),
        (["--user", "--", "m.gguf", "--prot", "9"], {}, "--prot"),
        (["--user", "--", "m.gguf", "--", "--api-key", "s3cret"], {}, "LLAMA_PHASE_API_KEY"),
        (["--user", "--", "m.gguf"], {"LLAMA_PHASE_API_KEY": "s3cret"}, "chmod 600"),
        (["--user", "--", "m.gguf"], {"LLAMA_API_KEY": "s3cret"}, "LLAMA_API_KEY chmod 600"),
        (["--user", "--", "m.gguf"], {"LLAMA_ARG_SOME_TOKEN": "s3cret"}, "LLAMA_ARG_SOME_TOKEN unset"),
        (["--user", "--name", "a/b", "--", "m.gguf"], {}, "'a/b'"),
    ],
)
def test_what_would_not_serve_is_refused_at_once(
    tmp_path: Path, words: list[str], environment: dict[str, str], said: str
) -> None:
    done = run(*words, cwd=tmp_path, **environment)
    assert done.returncode == 2 and "s3cret" not in done.stderr
    assert all(part in done.stderr for part in ([said] if said == "model is not given" else said.split())), done.stderr
    assert list(tmp_path.iterdir()) == []
