"""`llama-phase serve` in the foreground: signals, the status on the terminal, and the exit code."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from llama_phase.client import RequestFailed
from llama_phase.server import TICK_S, Server, State
from llama_phase.server_log import LogTail
from llama_phase.settings import Settings

POLL_EVERY_S = 2.0
READ_EVERY_S = 0.25
COUNTERS = ("entered", "left", "rolled_back", "failed")
PLAIN_EVERY_S = 10.0  # between two status lines where there is no terminal
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts the signals that ask to stop, from entering to leaving. The first says why, the second means at once."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _STOP_SIGNALS:
            # nohup: an ignored SIGHUP stays ignored. SIGINT is ignored in the background jobs of scripts, where
            # whoever sends it to us still means it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def asked(self) -> bool:
        return self.count > 0

    def asked_twice(self) -> bool:
        return self.count > 1


class Timings:
    """Speeds of the last request, from the log. Not from /metrics: each reading of it resets the rates there, which
    belong to whoever else watches the server."""

    _SPEED = re.compile(r"(prompt eval|eval) time = .*/ +(\d+) tokens .* ([\d.]+) tokens per second")
    _PROGRESS = re.compile(r"prompt processing, n_tokens = +(\d+), progress = ([\d.]+)")

    def __init__(self) -> None:
        self.prompt = self.answer = ""

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            speed = self._SPEED.search(line)
            if speed:
                text = f"{speed[2]} tokens at {speed[3]} tok/s"
                if speed[1] == "eval":
                    self.answer = f"answer {text}"
                else:
                    self.prompt, self.answer = f"prompt {text}", ""
                continue
            progress = self._PROGRESS.search(line)
            if progress:
                self.prompt, self.answer = f"prompt at {float(progress[2]):.0%} ({progress[1]} tokens)", ""


def describe_phase(phase: dict[str, Any] | None) -> str:
    """What the engine reports of its phases, not what it was asked for."""
    if phase is None:
        return "an engine without phases (stock)"
    if phase.get("mode", "off") == "off":
        return "phases off"
    counters = phase.get("counters", {})
    counts = ", ".join(f"{name.replace('_', ' ')} {counters.get(name, 0)}" for name in COUNTERS)
    return " · ".join(filter(None, [f"phase {phase.get('phase', '?')}", counts, str(phase.get("failure", ""))]))


class Poller(threading.Thread):
    """Asks a ready server for its phase. In a thread of its own: an answer may take long, and the main loop has to see
    a death or a signal at once."""

    def __init__(self, server: Server):
        super().__init__(name="llama-phase-poll", daemon=True)
        self.latest = ""
        self._client = server.client()
        self._ended = threading.Event()

    def run(self) -> None:
        with self._client as client:
            while not self._ended.is_set():
                # a server that is going down is the main loop's business
                with contextlib.suppress(RequestFailed):
                    self.latest = describe_phase(client.phase(timeout_s=30.0))
                self._ended.wait(POLL_EVERY_S)

    def end(self) -> None:
        self._ended.set()


class Status:
    """Shows the state: a live block on a terminal, plain lines elsewhere."""

    def __init__(self, server: Server, console: Console):
        self.server = server
        self.console = console
        self._tail: LogTail | None = None
        self._timings = Timings()
        self._read_s = 0.0
        self._last_line = ""
        self._shown = ""
        self._shown_s = 0.0
        self._began_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Status:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_live()

    def end_live(self) -> None:
        """Take the live block away; lines said from now on are the last."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def loading(self) -> None:
        lines = [line for line in self._new_lines() if line.strip()]
        self._last_line = lines[-1] if lines else self._last_line
        if self._live:
            seconds = time.monotonic() - self._began_s
            self._live.update(
                f"[bold]loading[/] {escape(self.server.settings.model.name)}  {seconds:.0f} s\n[dim]"
                f"{escape(self._last_line[: max(20, self.console.width - 1)])}[/]"
            )

    def running(self, phase: str) -> None:
        self._timings.feed(self._new_lines())
        line = " · ".join(filter(None, [phase, self._timings.prompt, self._timings.answer]))
        if self._live:
            self._live.update(f"[bold green]ready[/] {escape(self.server.url)}\n{escape(line)}")
            return
        now = time.monotonic()
        if phase and line != self._shown and now - self._shown_s >= PLAIN_EVERY_S:
            self._shown, self._shown_s = line, now
            self.say(line)

    def _new_lines(self) -> list[str]:
        now = time.monotonic()
        if now - self._read_s < READ_EVERY_S or self.server.log_path is None:
            return []
        self._read_s = now
        self._tail = self._tail or LogTail(self.server.log_path)
        return self._tail.read()


def serve(settings: Settings, console: Console) -> int:
    """Run one server until it is told to stop; the exit code: 128 + the signal's number (130 Ctrl-C, 143 SIGTERM).

    Raises what ``Server.start`` and ``Server.wait_ready`` raise, and ServerCrash or EngineUnusable when the server ends
    by itself. Nothing is left running in any case.
    """
    server = Server(settings)
    with StopSignals() as signals, Status(server, console) as status:
        try:
            if not signals.asked():
                server.start()
                status.say(f"loading {settings.model} (pid {server.pid}), log: {server.log_path}")
                server.wait_ready(stop_asked=signals.asked, progress=status.loading)
            if server.state is State.READY:
                status.say(f"ready: {server.url}")
                _watch(server, signals, status)
            status.end_live()
            status.say("stopping (Ctrl-C again: at once)" if signals.first == signal.SIGINT else "stopping")
            server.stop(hurry=signals.asked_twice)
        finally:
            server.close()
        status.say("stopped")
    return 128 + (signals.first or 0)


def _watch(server: Server, signals: StopSignals, status: Status) -> None:
    poller = Poller(server)
    poller.start()
    try:
        while not signals.asked():
            server.check_alive()
            status.running(poller.latest)
            time.sleep(TICK_S)
    finally:
        poller.end()
