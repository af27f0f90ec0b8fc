"""Token bytes to text as it comes: characters split over tokens are put together, stop words are cut off."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextPieces:
    """`add` gives the text that is certain by now; what may be the beginning of a stop word or of a character waits."""

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str] = ()):
        self.piece = piece
        self.stop = [word for word in stop if word]
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting = ""

    def add(self, token: int) -> str:
        self._waiting += self._decoder.decode(self.piece(token))
        found = [place for word in self.stop if (place := self._waiting.find(word)) >= 0]
        if found:
            self.stopped = True
            certain, self._waiting = self._waiting[: min(found)], ""
            return certain
        n_kept = max((self._overlap(word) for word in self.stop), default=0)
        certain = self._waiting[: len(self._waiting) - n_kept]
        self._waiting = self._waiting[len(certain) :]
        return certain

    def rest(self) -> str:
        """What was waiting when the answer ended."""
        text = self._waiting + ("" if self.stopped else self._decoder.decode(b"", final=True))
        self._waiting = ""
        return text

    def _overlap(self, word: str) -> int:
        """Length of the longest end of the text that begins `word`."""
        longest = min(len(word), len(self._waiting))
        return next((n for n in range(longest, 0, -1) if self._waiting.endswith(word[:n])), 0)
