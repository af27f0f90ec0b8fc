"""The slots of a running server: what they hold, saving, restoring, erasing, and a short greedy continuation."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llama_phase.client import Client, RequestFailed

STATE_MAGIC, STATE_VERSION = 0x67677371, 4  # LLAMA_STATE_SEQ_* of llama.h
PACKED_VERSION = 1  # SERVER_TOKENS_STATE_VERSION of server-common.cpp
MAX_TOKENS = 1 << 26


class Slot(NamedTuple):
    """`task`: of the last request in it; with `n_tokens` it says whether the content is still the same."""

    id: int
    n_tokens: int
    task: int
    busy: bool


@dataclass(frozen=True)
class Replay:
    """A greedy continuation: its tokens, their log probabilities, and how many prompt tokens were in the slot."""

    tokens: list[int]
    logprobs: list[float]
    n_cached: int


class SlotClient(Client):
    """File names are relative to the server's --slot-save-path. All raise RequestFailed."""

    def held(self, *, timeout_s: float = 10.0) -> list[Slot]:
        """What each slot holds."""
        rows = self.slots(timeout_s=timeout_s)
        try:
            return [
                Slot(row["id"], row.get("n_prompt_tokens", 0), row.get("id_task", -1), row["is_processing"])
                for row in rows
            ]
        except (KeyError, TypeError):
            raise RequestFailed(f"/slots: not the answer of a llama-server: {str(rows)[:80]}") from None

    def save(self, slot: int, filename: str, *, timeout_s: float | None = None) -> None:
        self._act(slot, "save", {"filename": filename}, timeout_s)

    def restore(self, slot: int, filename: str, *, timeout_s: float | None = None) -> None:
        self._act(slot, "restore", {"filename": filename}, timeout_s)

    def erase(self, slot: int, *, timeout_s: float | None = None) -> None:
        self._act(slot, "erase", {}, timeout_s)

    def replay(self, slot: int, tokens: Sequence[int], n: int, *, timeout_s: float | None = None) -> Replay:
        """Continue `tokens` greedily by `n`, a token a request: nothing is drafted for the last token of an answer, and
        drafts would change the shapes of the batches and leave out probabilities."""
        so_far, logprobs = list(tokens), []
        n_cached: int | None = None
        for _ in range(n):
            done = self.completion(so_far, 1, n_probs=1, id_slot=slot, timeout_s=timeout_s, ignore_eos=True)
            n_cached = int(done.timings.get("cache_n", 0)) if n_cached is None else n_cached
            logprobs += [position["logprob"] for position in done.probabilities]
            so_far += done.tokens
        return Replay(so_far[len(tokens) :], logprobs, n_cached or 0)

    def _act(self, slot: int, action: str, body: dict[str, Any], timeout_s: float | None) -> None:
        self._json("POST", f"/slots/{slot}?action={action}", body, timeout_s)


def saved_tokens(path: Path) -> list[int] | None:
    """The tokens of a saved slot; None when it holds images or audio. Raises OSError, and ValueError for another
    format: header (magic, version, count of words), then words: -1, version, count, tokens, count of media."""
    with path.open("rb") as file:
        magic, version, n_words = _words(file.read(12), 3)
        if (magic, version) != (STATE_MAGIC, STATE_VERSION) or not 0 <= n_words <= MAX_TOKENS:
            raise ValueError(f"{path} is no saved slot of this version")
        words = _words(file.read(4 * n_words), n_words)
    if not words or words[0] != -1:
        return list(words)
    if len(words) < 4 or words[1] != PACKED_VERSION or not 0 <= words[2] <= len(words) - 4:
        raise ValueError(f"{path} is no saved slot of this version")
    tokens, n_media = words[3 : 3 + words[2]], words[3 + words[2]]
    return None if n_media else list(tokens)


def _words(data: bytes, n: int) -> Sequence[int]:
    """`n` little-endian 32-bit integers. Raises ValueError when there are fewer."""
    words = array.array("i")
    words.frombytes(data[: len(data) // 4 * 4])
    if len(words) != n:
        raise ValueError("a saved slot ends early")
    if sys.byteorder == "big":
        words.byteswap()
    return words
