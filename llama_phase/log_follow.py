"""The logs of a supervisor and its servers, for `llama-phase logs`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from llama_phase.detached import LOOK_S, look, quietly
from llama_phase.errors import LlamaPhaseError
from llama_phase.instance import SUPERVISOR_LOG
from llama_phase.server_log import SCAN_BYTES, LogTail
from llama_phase.supervisor_status import read_status

LINE_BYTES = 1 << 20  # of a last line


def follow(folder: Path, n_lines: int, on: bool, *, supervisor: bool = False) -> Iterator[str]:
    """The last lines of the server's log (or the supervisor's own); with `on` those to come, across restarts.

    Raises LlamaPhaseError when there is no log.
    """
    path = _log_of(folder, supervisor)
    if path is None or not path.exists():
        raise LlamaPhaseError(f"there is no log yet in {folder}", fix="`llama-phase status` says what is going on")
    if not os.access(path, os.R_OK):
        raise LlamaPhaseError(f"may not read {path}", fix="ask as the user who started the supervisor")
    tail = LogTail(path)
    lines = tail.read(SCAN_BYTES)
    if not on:
        lines += _unended(path)
    yield from lines[-n_lines:] if n_lines else []
    over = False
    while on:
        ended = not supervisor and _server_ended(folder)
        yield from tail.read()
        now = quietly(lambda: _log_of(folder, supervisor))
        changed = now is not None and now != tail.path and now.exists()
        if (ended or changed) and not over:
            over = True
            yield from tail.read()
            yield from _unended(tail.path)
        if changed and now is not None:
            tail, over = LogTail(now), False
            yield f"--- {now}"
        time.sleep(LOOK_S)


def _server_ended(folder: Path) -> bool:
    status = quietly(lambda: look(folder))
    return status is not None and status.server_pid is None and bool(status.log)


def _unended(path: Path) -> list[str]:
    """The last line if no newline ends it: what aborts may not come to write one."""
    last = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
        last = file.read(LINE_BYTES).rpartition(b"\n")[2]
    return [last.decode("utf-8", "replace")] if last else []


def _log_of(folder: Path, supervisor: bool) -> Path | None:
    if supervisor:
        return folder / SUPERVISOR_LOG
    status = read_status(folder)
    return Path(status.log) if status is not None and status.log else None
