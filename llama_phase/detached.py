"""A supervisor in the background: started, stopped, looked at from another process, by way of its folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from llama_phase.errors import AlreadyRunning, LlamaPhaseError, ServerStartError
from llama_phase.holder import Holder, read_holder
from llama_phase.instance import CHANGE_SIGNAL, NOW_SIGNAL, SUPERVISOR_LOG, folder_of, put_request, signal_holder
from llama_phase.journal import Journal, Record, check_files
from llama_phase.server_log import SCAN_BYTES
from llama_phase.settings import Settings
from llama_phase.supervisor_status import FILE_NAME as STATUS_FILE
from llama_phase.supervisor_status import OWN_ERROR, SupervisorStatus, now_s, read_status

LOOK_S = 0.1
LOG_BYTES = 1 << 20  # of supervisor.log, beyond which a new one is begun
KILL_AFTER_S = 15.0
FIRST_WRITE_S = 60.0  # age at which a supervisor has long written its first status
ROOM_BYTES = 1 << 16  # for what a supervisor says when it starts
OVER = ("stopped", "failed")

Say = Callable[[str], None]
T = TypeVar("T")


def start(settings: Settings, words: Sequence[str], say: Say) -> None:
    """Start `serve` with these words in a session of its own, and wait until it is ready.

    Raises AlreadyRunning, or the supervisor's own failure with its exit code. An interrupted wait leaves it loading.
    """
    folder = folder_of(settings)
    holder = read_holder(folder)
    if holder is not None:
        raise AlreadyRunning(
            f"a supervisor already runs in {folder}: pid {holder.pid}, serving {holder.model}",
            fix="stop it with `llama-phase down`, or see `llama-phase status`",
        )
    log = _open_log(folder)
    begin = log.stat().st_size  # earlier runs are in there, too
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "llama_phase.cli", "serve", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_held(child, folder)
        say(f"supervisor started (pid {child.pid}), log: {log}")
        _wait_ready(child, folder, log, begin, say)
    except KeyboardInterrupt:
        if _holds(child, folder):
            say("still starting in the background; `llama-phase status --watch` shows it, `llama-phase down` ends it")
        else:  # `down` would not find it yet
            child.terminate()
            child.wait()
            say("not started")
        raise


def _wait_held(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Until the child holds the folder, where other commands find it, or has ended."""
    while child.poll() is None and not _holds(child, folder):
        time.sleep(LOOK_S)


def _holds(child: subprocess.Popen[bytes], folder: Path) -> bool:
    holder = quietly(lambda: read_holder(folder))
    return holder is not None and holder.pid == child.pid


def _wait_ready(child: subprocess.Popen[bytes], folder: Path, log: Path, begin: int, say: Say) -> None:
    said = ""
    while True:
        code = child.poll()
        status = quietly(lambda: read_status(folder))
        if status is not None and status.supervisor_pid != child.pid:
            status = None
        if code is not None:
            raise _end_of(code, status, log, begin)
        holder = quietly(lambda: read_holder(folder))
        if holder is not None and holder.pid == child.pid and holder.unwritten:
            raise _cannot_be_seen(folder, holder)
        if status is not None:
            line = summary(status)[0]
            if status.state != "ready" and line != said:
                said = line
                say(line)
            if status.state == "ready":
                for line in summary(status):
                    say(line)
                return
        time.sleep(LOOK_S)


def _end_of(code: int, status: SupervisorStatus | None, log: Path, begin: int) -> ServerStartError:
    """Why a supervisor ended: its last failure, its own error, or what its log says from byte `begin` on."""
    own = [note for note in status.notes if note.startswith(OWN_ERROR)] if status is not None else []
    if status is not None and status.failure is not None and not own:
        return ServerStartError(status.failure.text + _quote(status), fix=status.failure.fix, exit_code=code)
    last = [line for line in read_from(log, begin) if line.startswith(("error: ", "fix: "))][-2:]
    text = next((line[7:] for line in last if line.startswith("error: ")), (own or [f"exit code {code}"])[-1])
    fix = next((line[5:] for line in last if line.startswith("fix: ")), f"the whole log is {log}")
    return ServerStartError(text, fix=fix, exit_code=code if code > 0 else 1)


def stop(folder: Path, say: Say, *, at_once: bool = False) -> bool:
    """Stop the supervisor of `folder` and wait for its end; False when none runs. A second Ctrl-C stops at once.

    Raises LlamaPhaseError when it is not ours to stop.
    """
    holder = read_holder(folder)
    if holder is None:
        return False
    if not signal_holder(holder, NOW_SIGNAL if at_once else signal.SIGTERM):
        if not holder.alive:
            return False
        raise LlamaPhaseError(
            f"may not stop the supervisor with pid {holder.pid}, which is another user's",
            fix="ask as the user who started it",
        )
    say(f"stopping {holder.model} (supervisor pid {holder.pid})")
    try:
        _wait_gone(holder, KILL_AFTER_S if at_once else None)
    except KeyboardInterrupt:
        signal_holder(holder, NOW_SIGNAL)
        _wait_gone(holder, KILL_AFTER_S)
    if holder.alive:  # its server dies with it
        signal_holder(holder, signal.SIGKILL)
        _wait_gone(holder, None)
    return True


def _wait_gone(holder: Holder, limit_s: float | None) -> None:
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while holder.alive and (end_s is None or time.monotonic() < end_s):
        time.sleep(LOOK_S)


def look(folder: Path) -> SupervisorStatus | None:
    """The status as it is now, not as it was written last: a supervisor that was killed cannot write that it is gone.

    None when there never was one. Raises LlamaPhaseError when it cannot be told.
    """
    holder = read_holder(folder)
    if holder is None:
        status = read_status(folder)
        if status is None or status.state in OVER:
            return status
        holder = read_holder(folder)  # of one that started in between
    if holder is not None:
        return _of_living(folder, holder)
    gone = replace(status, server_pid=None, server_birth_s=None, restart_at_s=None)
    if status.exit_code is not None:
        note = f"the supervisor (pid {status.supervisor_pid}) ended with exit code {status.exit_code} and no reason"
        return replace(gone, state="failed", notes=(*status.notes, note))
    note = f"the supervisor (pid {status.supervisor_pid}) is gone without a word: it was killed, or the machine stopped"
    return replace(gone, state="stopped", notes=(*status.notes, note))


def _of_living(folder: Path, holder: Holder) -> SupervisorStatus:
    if holder.unwritten:
        raise _cannot_be_seen(folder, holder)
    status = read_status(folder)
    if status is not None and (status.supervisor_pid, status.supervisor_birth_s) == (holder.pid, holder.birth_s):
        return status
    if holder.age_s > FIRST_WRITE_S:
        raise _cannot_be_seen(folder, holder)
    began_s = time.time() - holder.age_s
    return SupervisorStatus(
        "starting", began_s, holder.pid, holder.birth_s or 0.0, model=holder.model, started_s=began_s
    )


def _cannot_be_seen(folder: Path, holder: Holder) -> LlamaPhaseError:
    why = f": {holder.unwritten}" if holder.unwritten else ""
    return LlamaPhaseError(
        f"the supervisor with pid {holder.pid} runs, serving {holder.model}, but cannot write"
        f" {folder / STATUS_FILE}{why}; so its state cannot be told",
        fix=f"free or allow it (`df {folder}` shows the space left); it is written again within seconds",
    )


def summary(status: SupervisorStatus) -> list[str]:
    """What a person wants to know, the state first."""
    now = now_s(status)
    first = f"{status.state}: {status.model}"
    if status.state == "ready":
        first += f" at {status.url}"
    elif status.restart_at_s is not None:
        first += f", waiting {max(0.0, status.restart_at_s - now):.0f} s for the next attempt"
    elif status.state == "starting":
        first += ", first prompt" if status.load_s is not None else ", loading"
    lines = [first, f"  for {_duration(now - status.since_s)}, configuration {status.configuration}"]
    if status.server_pid:
        lines.append(f"  supervisor pid {status.supervisor_pid}, server pid {status.server_pid}, log {status.log}")
    if status.load_s is not None and status.state == "ready":
        probe = "" if status.probe_s is None else f", the first prompt took {status.probe_s:.1f} s"
        lines.append(f"  loaded in {status.load_s:.1f} s{probe}")
    if status.restarts:
        reasons = ", ".join(f"{kind} {count}" for kind, count in sorted(status.restarts_by_reason.items()))
        lines.append(f"  restarts: {status.restarts} ({reasons})")
    if status.rolled_back:
        back = status.rolled_back
        lines.append(f"  ROLLED BACK from {back.failed} to {back.serving}, {_ago(now, back.at_s)}: {back.reason}")
    if status.failure:
        failure = status.failure
        code = "" if failure.returncode is None else f", status {failure.returncode}"
        lines.append(f"  last failure: {failure.kind}{code}, {_ago(now, failure.at_s)}: {failure.text}")
        lines += [f"    | {line}" for line in failure.log_lines]
        lines.append(f"    fix: {failure.fix}")
    return lines + [f"  {note}" for note in status.notes]


def read_from(path: Path, begin: int) -> list[str]:
    """The lines from byte `begin` on; empty when it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read(SCAN_BYTES).decode("utf-8", "replace").splitlines()
    return []


def quietly(read: Callable[[], T]) -> T | None:
    """For those who look again soon: what cannot be told now is nothing."""
    try:
        return read()
    except LlamaPhaseError:
        return None


def roll_back(folder: Path, number: int | None, say: Say) -> Record:
    """Have the running supervisor serve an earlier configuration: record `number`, or the newest good one that is not
    served now. Returns when it took the request. Raises LlamaPhaseError, for a model file that is not there or is not
    whole, too: what serves now goes on then."""
    status, holder = look(folder), read_holder(folder)
    good = Journal(folder / "served").good()
    if number is not None:
        found = [record for record in good if record.number == number]
        if not found:
            raise LlamaPhaseError(f"there is no configuration {number}", fix="see `llama-phase rollback --list`")
    else:
        found = [item for item in good if status is None or item.configuration.fingerprint != status.configuration]
        if not found:
            raise LlamaPhaseError(
                "no other configuration has served yet, so there is nothing to go back to",
                fix="see `llama-phase rollback --list`",
            )
    if holder is None:
        raise LlamaPhaseError(f"no supervisor runs in {folder}", fix="start one first: `llama-phase up MODEL`")
    record = found[0]
    if status is not None and status.configuration == record.configuration.fingerprint:
        say(f"configuration {record.configuration.fingerprint} is served already")
        return record
    with contextlib.suppress(OSError):  # it is ending, or another user's: nothing will come of the request
        check_files(record.configuration, Path(os.readlink(f"/proc/{holder.pid}/cwd")))
    put_request(folder, record.configuration.fingerprint)
    signal_holder(holder, CHANGE_SIGNAL)
    say(f"changing to configuration {record.configuration.fingerprint} ({record.configuration.model})")
    return record


def _open_log(folder: Path) -> Path:
    path = folder / SUPERVISOR_LOG
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES:
                path.replace(path.with_suffix(".old.log"))
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        raise LlamaPhaseError(
            f"cannot write in {folder}: {error.strerror}",
            fix="free or allow it, or name another folder with LLAMA_PHASE_STATE_DIR",
        ) from None
    return path


def _quote(status: SupervisorStatus) -> str:
    return "".join(f"\n  | {line}" for line in status.failure.log_lines) if status.failure else ""


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ago(now_s: float, then_s: float) -> str:
    return f"{_duration(now_s - then_s)} ago"
