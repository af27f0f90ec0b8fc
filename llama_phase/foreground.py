"""`llama-phase serve` in the foreground: signals, the status on the terminal, and the exit code."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from llama_phase.companions import companions_for
from llama_phase.errors import LlamaPhaseError
from llama_phase.holder import Lock
from llama_phase.instance import CHANGE_SIGNAL, NOW_SIGNAL, folder_of, policy_of, take_request
from llama_phase.lossy_stream import LossyStream
from llama_phase.server_log import LogTail
from llama_phase.settings import Settings
from llama_phase.supervisor import Supervisor
from llama_phase.supervisor_status import SupervisorStatus, now_s

READ_EVERY_S = 0.25
COUNTERS = ("entered", "left", "rolled_back", "failed")
PLAIN_EVERY_S = 10.0  # between two status lines where there is no terminal
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Counts the signals that ask to stop, from entering to leaving. The first says why, the second means at once.

    Two of one number that come close together are one to the kernel; NOW_SIGNAL alone counts as two.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self.folder: Path | None = None
        self.on_first: Callable[[], None] | None = None
        self._change = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _STOP_SIGNALS:
            # nohup: an ignored SIGHUP stays ignored. SIGINT is ignored in the background jobs of scripts, where
            # whoever sends it to us still means it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._before[CHANGE_SIGNAL] = signal.signal(CHANGE_SIGNAL, self._note_change)
        self._before[NOW_SIGNAL] = signal.signal(NOW_SIGNAL, self._note_now)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def _note_now(self, *_: object) -> None:
        self.count += 2
        self.first = self.first or signal.SIGTERM

    def _note_change(self, *_: object) -> None:
        self._change = True

    def change_asked(self) -> str | None:
        """Fingerprint of the configuration that `llama-phase rollback` wants, told once."""
        if not self._change or self.folder is None:
            return None
        self._change = False
        return take_request(self.folder)

    def asked(self) -> bool:
        if self.count and self.on_first is not None:  # not in the handler, which may interrupt a print
            tell, self.on_first = self.on_first, None
            tell()
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


class Status:
    """Shows the state of a supervisor: a live block on a terminal, plain lines elsewhere. What cannot be
    written is dropped."""

    def __init__(self, console: Console):
        self.console = console
        console.file = LossyStream(console.file)  # type: ignore[assignment]
        self._tail: LogTail | None = None
        self._timings = Timings()
        self._read_s = 0.0
        self._last_line = ""
        self._shown = ""
        self._shown_s = 0.0
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

    def show(self, supervisor: Supervisor) -> None:
        """Called often; draws when there is something new."""
        status, attempt = supervisor.status, supervisor.attempt
        observer = attempt.observer if attempt is not None else None
        if status.state == "ready":
            known = observer is not None and observer.phase_known
            self._running(status, describe_phase(observer.phase) if known and observer else "")
        elif status.state == "starting":
            self._loading(status)

    def _loading(self, status: SupervisorStatus) -> None:
        lines = [line for line in self._new_lines(status.log) if line.strip()]
        self._last_line = lines[-1] if lines else self._last_line
        if not self._live:
            return
        if status.restart_at_s is not None:
            self._live.update(f"[bold yellow]waiting[/] {max(0.0, status.restart_at_s - now_s(status)):.0f} s")
            return
        what = "loading" if status.load_s is None else "first prompt"
        self._live.update(
            f"[bold]{what}[/] {escape(status.model)}  {now_s(status) - status.since_s:.0f} s\n[dim]"
            f"{escape(self._last_line[: max(20, self.console.width - 1)])}[/]"
        )

    def _running(self, status: SupervisorStatus, phase: str) -> None:
        self._timings.feed(self._new_lines(status.log))
        line = " · ".join(filter(None, [phase, self._timings.prompt, self._timings.answer]))
        if self._live:
            back = " (rolled back)" if status.rolled_back else ""
            self._live.update(f"[bold green]ready[/] {escape(status.url)}{back}\n{escape(line)}")
            return
        now = time.monotonic()
        if phase and line != self._shown and now - self._shown_s >= PLAIN_EVERY_S:
            self._shown, self._shown_s = line, now
            self.say(line)

    def _new_lines(self, log: str) -> list[str]:
        now = time.monotonic()
        if now - self._read_s < READ_EVERY_S or not log:
            return []
        self._read_s = now
        if self._tail is None or str(self._tail.path) != log:
            self._tail = LogTail(Path(log))
        return self._tail.read()


def serve(settings: Settings, console: Console) -> int:
    """Keep a server running until told to stop; the exit code: 128 + the signal's number (130 Ctrl-C, 143 SIGTERM).

    Raises what the last failure was, when there is nothing left to try. Nothing is left running in any case.
    """
    lock = Lock(folder_of(settings))
    with StopSignals() as signals:  # before the lock: whoever sees its holder may signal it
        lock.take(settings.model.name, settings.tcp_hosts, settings.port)
        try:
            with Status(console) as status:
                signals.folder = lock.folder
                signals.on_first = lambda: status.say(
                    "stopping (Ctrl-C again: at once)" if signals.first == signal.SIGINT else "stopping"
                )
                return _supervise(settings, lock, signals, status)
        finally:
            lock.release()


def _supervise(settings: Settings, lock: Lock, signals: StopSignals, status: Status) -> int:
    supervisor = Supervisor(settings, lock.folder, policy=policy_of(settings), say=status.say, mark=lock.mark)
    supervisor.companions = companions_for(settings, supervisor.status, supervisor.note)
    try:
        last = supervisor.run(signals, lambda: status.show(supervisor))
        status.end_live()
        if last.state == "failed" and supervisor.error is not None:
            raise supervisor.error
    except BaseException as error:
        supervisor.end(error.exit_code if isinstance(error, LlamaPhaseError) else 1, error)
        raise
    status.say("stopped")
    code = 128 + (signals.first or 0)
    supervisor.end(code)
    return code
