"""A folder with a model, a scripted llama-server and a state folder, and everything that was started in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fake_gguf import write_gguf

from llama_phase.server import Server
from llama_phase.settings import Settings

TESTS = Path(__file__).parent
SOON_S = 30.0  # for conditions that are polled; nothing here takes that long unless it hangs


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {SOON_S} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class World:
    """A folder with a model, a fake llama-server and a state folder, and what was started in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.model = write_gguf(folder / "model.gguf")
        self.dump = folder / "dump.json"
        binary = folder / "llama-server"
        binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TESTS / "fake_llama_server.py"}" "$@"\n')
        binary.chmod(0o755)
        for name in list(os.environ):
            if name.startswith(("LLAMA_", "GGML_", "FAKE_")):
                monkeypatch.delenv(name)
        self.set = monkeypatch.setenv
        self.set("LLAMA_PHASE_SERVER_BINARY", str(binary))
        self.set("LLAMA_PHASE_STATE_DIR", str(folder / "state"))
        self.set("FAKE_DUMP", str(self.dump))
        self.started: list[subprocess.Popen[str]] = []

    def server(self, **options: object) -> Server:
        flags = {"model": self.model, "port": 0, "grace_s": 5} | options
        return Server(Settings.load(**flags))

    def serve(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """Start the real command; its output goes to files, so that nothing can block on a pipe."""
        command = [sys.executable, "-m", "llama_phase.cli", "serve", str(self.model), "--port", "0", *words]
        with (self.folder / "err").open("w") as err, (self.folder / "out").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=err, text=True, **options)
        self.started.append(process)
        return process

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text() + (self.folder / "out").read_text()

    def child(self) -> dict[str, object]:
        """What the fake server says of itself, once it has."""
        until(lambda: self.dump.exists() and self.dump.read_text().endswith("}"), "the server started")
        return json.loads(self.dump.read_text())

    def child_pid(self) -> int:
        return int(str(self.child()["pid"]))

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "state" / "log").glob("*.log"))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.dump.exists() and self.dump.read_text().endswith("}"):
            pid = json.loads(self.dump.read_text())["pid"]
            until(lambda: gone(pid), "the server is gone after the test")
