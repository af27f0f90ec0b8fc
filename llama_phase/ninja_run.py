"""Run cmake and ninja: full log to a file, progress with an ETA, the first errors on failure, nothing left on Ctrl-C.

The child leads a process group of its own, which is ended as a whole. ninja then deletes half-written outputs, so the
next run goes on where this one stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llama_phase.errors import BuildError

GRACE_S = 10.0
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
_ERROR = re.compile(r"(?:\berror:|CMake Error|undefined reference|ninja: error|fatal error|No space left|Killed)")


@dataclass
class NinjaProgress:
    """Reads ninja's ``[n/m] what`` lines. Time left is extrapolated from the steps of this run."""

    started_s: float
    done: int = 0
    total: int = 0
    label: str = ""

    def feed(self, line: str) -> bool:
        """True when ``line`` is a status line."""
        match = _STATUS.match(line)
        if match:
            self.done, self.total, self.label = int(match[1]), int(match[2]), _short(match[3])
        return match is not None

    def eta_s(self, now_s: float) -> float | None:
        """Seconds left; None while too few steps are done to tell."""
        return (now_s - self.started_s) / self.done * (self.total - self.done) if self.done > 2 else None


def _short(label: str) -> str:
    return label.rsplit("/", 1)[-1].removesuffix(".o") if label.startswith("Building") else label


def eta_text(seconds: float | None) -> str:
    if seconds is None:
        return "ETA ?"
    return f"ETA {seconds / 60:.0f} min" if seconds >= 90 else f"ETA {seconds:.0f} s"


def first_errors(log: str, limit: int = 6) -> list[str]:
    """The first lines of a log that say what went wrong; its last lines when none does."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    found = [index for index, line in enumerate(lines) if _ERROR.search(line)]
    if not found:
        return lines[-limit:]
    if lines[found[0]].startswith("CMake Error"):  # the text follows on the next lines
        return lines[found[0] : found[0] + limit]
    return [lines[index] for index in found[:limit]]


@contextlib.contextmanager
def terminate_on_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP become SystemExit, so that children are ended on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_group(process: subprocess.Popen[str], grace_s: float = GRACE_S) -> None:
    """End the child's whole process group: SIGTERM, then SIGKILL after the grace time. Idempotent."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def run_logged(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str],
    *,
    append: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run ``command``, write all it prints to ``log``, call ``on_line`` for each line; returns the exit code."""
    with log.open("a" if append else "w", errors="replace") as file, terminate_on_signal():
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                on_line(line.rstrip("\n"))
            return process.wait()
        finally:
            if process.poll() is None:
                end_group(process)
            if process.stdout is not None:
                process.stdout.close()


def run_step(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str],
    what: str,
    *,
    append: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """``run_logged``; raises BuildError with the first error lines and the log's path when the command fails."""
    start = log.stat().st_size if append and log.exists() else 0
    code = run_logged(command, log, environ, append=append, on_line=on_line)
    if code:
        with log.open(errors="replace") as file:
            file.seek(start)
            errors = first_errors(file.read())
        raise BuildError(
            f"{what} failed (exit code {code}):\n" + "\n".join(f"    {line}" for line in errors),
            fix=f"the whole log is {log}; a further run resumes",
        )


def run_ninja(command: Sequence[str], log: Path, environ: Mapping[str, str], what: str, console: Console) -> int:
    """Run ninja with progress on ``console``: a bar on a terminal, else a line per tenth. Returns the steps it ran."""
    state = NinjaProgress(time.monotonic())
    if not console.is_terminal:
        tenth = -1

        def plain(line: str) -> None:
            nonlocal tenth
            if state.feed(line) and state.done * 10 // state.total > tenth:
                tenth = state.done * 10 // state.total
                console.print(
                    f"{what}: {state.done}/{state.total}, {eta_text(state.eta_s(time.monotonic()))}",
                    markup=False,
                    highlight=False,
                )

        run_step(command, log, environ, what, append=True, on_line=plain)
        return state.done
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[eta]}"),
        TextColumn("{task.fields[label]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, eta="", label="")

        def show(line: str) -> None:
            if state.feed(line):
                bar.update(
                    task,
                    completed=state.done,
                    total=state.total,
                    label=state.label[:40],
                    eta=eta_text(state.eta_s(time.monotonic())),
                )

        run_step(command, log, environ, what, append=True, on_line=show)
    return state.done
