"""Failures a user can act on, and the exit code each one ends the process with.

Every error says what is wrong, names the thing (path, variable, port, step) and, in ``fix``, what to type or change.
Exit codes are part of the interface: docs/exit-codes.md lists them, and a test keeps the two in step.
"""

from __future__ import annotations


class LlamaPhaseError(Exception):
    """Base of all user-facing failures. ``str(error)`` is one sentence; ``fix`` is the next thing to do."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "", exit_code: int | None = None):
        super().__init__(message)
        self.fix = fix
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(LlamaPhaseError):
    """A flag, variable or setting is wrong or unknown."""

    exit_code = 2


class EngineClosed(UsageError):
    """An engine, context or its controls were used after they were closed, or in a process forked from theirs."""


class EngineBusy(UsageError):
    """Two threads, or two generations, want the same engine at once."""


class MissingPrerequisite(LlamaPhaseError):
    """A tool, library or disk space the step needs is not there."""

    exit_code = 3


class SourceError(LlamaPhaseError):
    """The pinned source could not be fetched, or is not what the lock file says."""

    exit_code = 4


class PatchError(LlamaPhaseError):
    """A patch does not apply, or the queue breaks its own rules."""

    exit_code = 5


class BuildError(LlamaPhaseError):
    """Configuring or compiling the engine failed."""

    exit_code = 6


class ModelError(LlamaPhaseError):
    """The model file is missing, incomplete, or not a GGUF this engine can serve."""

    exit_code = 7


class PortBusy(LlamaPhaseError):
    """Another process listens on the port."""

    exit_code = 8


class ServerStartError(LlamaPhaseError):
    """The server ended before it was ready."""

    exit_code = 9


class ServerCrash(LlamaPhaseError):
    """The server ended by itself after it had been ready."""

    exit_code = 10


class AlreadyRunning(LlamaPhaseError):
    """Another supervisor holds the folder."""

    exit_code = 12


class EngineUnusable(LlamaPhaseError):
    """The engine lost its compute buffers and cannot go on (leave of a transaction failed)."""

    exit_code = 75
