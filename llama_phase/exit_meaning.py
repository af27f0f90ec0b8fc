"""What the end of a llama-server means: a pure function from exit status and log to a typed error."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from llama_phase.errors import EngineUnusable, LlamaPhaseError, ServerCrash, ServerStartError, UsageError

ENGINE_UNUSABLE = 75
ENGINE_REFUSED_ENVIRONMENT = 78
_BIND_FAILED = re.compile(r"couldn't bind HTTP server socket")
# the first pattern found in the log, from its end, names the fix
_FIXES = (
    (re.compile(r"invalid argument: (\S+)"), "llama-server knows no flag `{0}`: correct it after `--`"),
    (re.compile(r"error while handling argument \"(\S+?)\""), "correct the value of `{0}` after `--`"),
    (re.compile(r"error while handling environment variable \"(\S+?)\""), "correct or unset the variable {0}"),
    (re.compile(r"out of memory|failed to allocate|cudaMalloc", re.IGNORECASE),
     "it needs less memory: a smaller -c or -ub, fewer -ngl, or LLAMA_PHASE_PREFILL_UBATCH lower"),
    (re.compile(r"unknown model architecture: '?([\w-]+)"), "this llama.cpp does not know the architecture {0}"),
)  # fmt: skip
_SIGNAL_FIXES: dict[int, str] = {
    signal.SIGILL: "the engine was built for another processor: run `llama-phase build` on this machine",
    signal.SIGKILL: "if nobody killed it, the kernel did for lack of memory: see `dmesg`, use a smaller -c",
}


def name_status(returncode: int) -> str:
    """`exit code 1`, or `signal SIGSEGV` for a negative status as subprocess reports it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def bind_failed(lines: Sequence[str]) -> bool:
    """Whether the log says that the port was taken in the meantime."""
    return any(_BIND_FAILED.search(line) for line in lines)


def explain_exit(returncode: int, lines: Sequence[str], *, was_ready: bool, log: str) -> LlamaPhaseError:
    """The error for a server that ended by itself.

    `returncode` as of subprocess (negative: a signal); `lines` are the relevant ones of its log, quoted below the
    sentence; `log` is the path of the whole.
    """
    when = "after it had been ready" if was_ready else "before it was ready"
    quote = "".join(f"\n  | {line[:300]}" for line in lines)
    fix = f"the whole log is {log}"
    if returncode == ENGINE_REFUSED_ENVIRONMENT:
        return UsageError(
            f"the engine refused a LLAMA_PHASE_* variable (exit code {returncode}){quote}",
            fix=f"correct or unset it; {fix}",
            exit_code=ENGINE_REFUSED_ENVIRONMENT,
        )
    if returncode == ENGINE_UNUSABLE:
        return EngineUnusable(
            f"the engine could not get its decode buffers back (exit code {returncode}){quote}",
            fix=f"start it again; if it happens often, lower LLAMA_PHASE_PREFILL_UBATCH; {fix}",
        )
    hint = _SIGNAL_FIXES.get(-returncode, "")
    for line in reversed(lines):
        for pattern, text in _FIXES:
            match = pattern.search(line)
            if match and not hint:
                hint = text.format(*match.groups())
    kind = ServerCrash if was_ready else ServerStartError
    return kind(f"llama-server ended {when}: {name_status(returncode)}{quote}", fix=f"{hint}; {fix}" if hint else fix)
