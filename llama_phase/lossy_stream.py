"""A text stream whose writes never fail: what serves must not end because its log cannot be written."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TextIO


class LossyStream:
    """Passes text on to `stream`; what a full disk or a reader that is gone does not take is dropped.

    Writes to the file descriptor itself: a buffer would keep what failed, fail again with each later write, and turn
    the exit code of the process into Python's own at its last flush.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            fd = self._fd()
            if fd is None:
                self._stream.write(text)
            else:
                data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
                while data:
                    data = data[os.write(fd, data) :]
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _fd(self) -> int | None:
        try:
            return self._stream.fileno()
        except (OSError, ValueError, AttributeError):  # in memory
            return None
