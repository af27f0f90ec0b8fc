"""Large files that are there whole or not at all.

A file is made as NAME.part and renamed when complete. The .part is locked for as long as it is being written, so two
processes that want the same file take turns: the second waits, and should look first whether there is anything left to
do. A .part that a killed process left is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llama_phase.errors import MissingPrerequisite, ModelError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield NAME.part, locked; delete it on leaving, whatever happened. ``commit`` it when it is complete.

    Makes the folder. Turns OSError into MissingPrerequisite (no space left) or ModelError (place not writable).
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with part.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # the holder before us renamed or deleted the file we waited for: lock its successor instead
                if not _is_open_as(lock, part):
                    continue
                try:
                    yield part
                finally:
                    if _is_open_as(lock, part):
                        part.unlink()
                return
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise MissingPrerequisite(
                f"{path}: no space left while writing ({error.strerror})", fix="free space, or choose another place"
            ) from None
        raise ModelError(f"{path} cannot be written: {error.strerror or error}", fix="choose another place") from None


def commit(part: Path, path: Path) -> None:
    """Give the complete file its name, replacing what has it."""
    os.replace(part, path)


def need_space(path: Path, n_bytes: int) -> None:
    """Raise MissingPrerequisite if the disk of ``path`` has less than ``n_bytes`` free. Its folder must exist."""
    free = shutil.disk_usage(path.parent).free
    if n_bytes > free:
        raise MissingPrerequisite(
            f"{path} needs {n_bytes / 1e9:.2f} GB, but {path.parent} has {free / 1e9:.2f} GB free",
            fix="free space, or choose another place",
        )


def _is_open_as(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
