"""Starts a process that does not outlive us.

It leads a session of its own: Ctrl-C in the terminal reaches only us, and a signal from us reaches all it started. It
writes its log straight into a file. It dies with us even when we are SIGKILLed: it asks the kernel for a SIGKILL at its
parent's death (PR_SET_PDEATHSIG). The kernel means the *thread* that forked, so the fork is always done by one thread
that lives as long as this process, whichever thread asks for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

_PR_SET_PDEATHSIG = 1


@lru_cache(maxsize=1)
def _forker() -> ThreadPoolExecutor:
    """The one thread that forks servers; it ends with the interpreter."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="llama-phase-fork")


def spawn(command: list[str], environment: dict[str, str], log_fd: int) -> subprocess.Popen[bytes]:
    """Start a server. Raises OSError or subprocess.SubprocessError when it cannot be run."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: no locks are taken after it

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    def fork() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    return _forker().submit(fork).result()
