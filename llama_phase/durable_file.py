"""A file that is on the disk once written: whatever interrupts, a reader finds the whole file or none of it.

    write temporary -> sync it -> rename -> sync the folder

Before the rename nothing is visible under the name; after it the content is on the disk already. The sync of the folder
makes the name itself last. The steps are injected, so that a test can stop after each byte.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

TEMPORARY = ".tmp"


class Disk(Protocol):
    """The steps of a durable write; each raises OSError when the disk refuses."""

    def create(self, path: Path, content: bytes) -> None: ...
    def sync(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...
    def sync_folder(self, folder: Path) -> None: ...
    def remove(self, path: Path) -> None: ...


class RealDisk:
    """The file system."""

    def create(self, path: Path, content: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_folder(self, folder: Path) -> None:
        self.sync(folder)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes, disk: Disk) -> None:
    """Write `path`, readable by this user only, and return when it survives a power loss.

    Raises OSError; then the old file, if any, is still there. One writer at a time: the temporary has a fixed name, so
    that a stale one is used again.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    disk.create(temporary, content)
    disk.sync(temporary)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)
