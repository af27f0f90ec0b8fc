"""What kind of failure the end of a server was, and whether the same start would fail again. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from llama_phase.errors import LlamaPhaseError, MissingPrerequisite, ModelError, PortBusy, UsageError
from llama_phase.exit_meaning import ENGINE_REFUSED_ENVIRONMENT, ENGINE_UNUSABLE, bind_failed
from llama_phase.supervisor_status import Failure

# kind -> in words
KINDS = {
    "bad_flag": "llama-server refused a flag or its value",
    "bad_variable": "the engine refused a variable",
    "bad_setting": "a setting is wrong",
    "missing_file": "a file is missing",
    "bad_model": "the model cannot be served by this engine",
    "program": "the engine cannot be run",
    "port": "the port is taken",
    "oom_load": "out of memory while loading",
    "oom_transaction": "the prefill phase does not fit",
    "oom": "out of memory while serving",
    "engine_unusable": "the engine lost its decode buffers",
    "illegal_instruction": "built for another processor",
    "killed": "killed, by somebody or by the kernel for memory",
    "signal": "ended by a signal",
    "exit": "ended by itself",
    "hang_load": "no sign of life while starting",
    "hang": "no progress while busy",
    "probe": "the first prompt failed",
}
# before it was ever ready: the same start fails the same way
DETERMINISTIC = frozenset(
    {"bad_flag", "bad_variable", "bad_setting", "missing_file", "bad_model", "program", "port", "oom_load",
     "oom_transaction", "illegal_instruction", "exit", "probe"}
)  # fmt: skip
# ... unless it served before: then something around it changed, and may change back
MAY_PASS = frozenset({"missing_file", "port", "oom_load", "oom_transaction", "exit", "probe"})
# another configuration would fail as well
NOT_OF_THE_CONFIGURATION = frozenset({"port"})

_OOM = re.compile(
    r"out of memory|failed to allocate|unable to allocate|cannot allocate memory|cudaMalloc failed|bad_alloc"
    r"|alloc_tensor_range: failed",
    re.IGNORECASE,
)
_PATTERNS = (
    ("bad_flag", re.compile(r"invalid argument: |error while handling argument|unknown argument|expected value for")),
    ("bad_variable", re.compile(r"error while handling environment variable")),
    ("missing_file", re.compile(r"No such file or directory|failed to open GGUF file|cannot open file", re.IGNORECASE)),
    ("bad_model", re.compile(
        r"unknown model architecture|error loading model|failed to load model|invalid magic|tensor '.*' has wrong"
        r"|key not found in model|unsupported file version", re.IGNORECASE)),
)  # fmt: skip


def kind_of_exit(returncode: int, lines: Sequence[str], *, was_ready: bool) -> str:
    """The kind for a server that ended by itself; `lines` are the relevant ones of its log."""
    if returncode == ENGINE_REFUSED_ENVIRONMENT:
        return "bad_variable"
    if returncode == ENGINE_UNUSABLE:
        return "engine_unusable" if was_ready else "oom_transaction"
    if returncode == -signal.SIGILL:
        return "illegal_instruction"
    if returncode == -signal.SIGKILL:
        return "killed"
    if was_ready:
        return "oom" if any(map(_OOM.search, lines)) else "signal" if returncode < 0 else "exit"
    if bind_failed(lines):
        return "port"
    # memory before the rest: what failed for it goes on to complain about the model
    if any(map(_OOM.search, lines)):
        return "oom_load"
    for kind, pattern in _PATTERNS:
        if any(map(pattern.search, lines)):
            return kind
    return "signal" if returncode < 0 else "exit"


def kind_of_error(error: LlamaPhaseError) -> str:
    """The kind for a start that was refused before there was a process."""
    if isinstance(error, PortBusy):
        return "port"
    if isinstance(error, ModelError):
        return "missing_file" if re.search("missing|no file|No such file", str(error)) else "bad_model"
    if isinstance(error, MissingPrerequisite):
        return "program"
    return "bad_setting" if isinstance(error, UsageError) else "exit"


def failure_of(
    error: LlamaPhaseError,
    *,
    kind: str,
    at_s: float,
    returncode: int | None = None,
    was_ready: bool = False,
    log: str = "",
    lines: Sequence[str] = (),
) -> Failure:
    """The failure as data. The log lines that the error's text quotes are kept apart."""
    return Failure(
        kind=kind,
        text=str(error).split("\n  | ")[0],
        at_s=at_s,
        fix=error.fix,
        deterministic=kind in DETERMINISTIC and not was_ready,
        returncode=returncode,
        was_ready=was_ready,
        exit_code=error.exit_code,
        log=log,
        log_lines=tuple(line[:300] for line in lines),
    )
