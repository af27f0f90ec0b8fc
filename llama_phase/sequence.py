"""The one sequence of a context in this process, and which tokens it holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from llama_phase.errors import EngineClosed, EngineUnusable, LlamaPhaseError


class Cancelled(Exception):
    """cancel() ended the decode. Engine makes a chunk of it."""


class HeldSequence:
    """Tokens decoded into `context` (llama_phase._engine.Context) and not forgotten since."""

    def __init__(self, context: Any):
        self.context = context
        self.tokens: list[int] = []
        self.decoding: int | None = None  # the thread that is inside llama.cpp
        self.closing = False

    def append(self, batch: list[int]) -> None:
        """Decode `batch` behind what is held: all of it or, when an exception passes, nothing.

        Raises Cancelled, EngineClosed when close() ended it, EngineUnusable, or what a signal handler raised.
        """
        position = len(self.tokens)
        self.decoding = threading.get_ident()
        try:
            result = self.context.decode(batch, position)
        except BaseException:
            self.keep(position)
            raise
        finally:
            self.decoding = None
        if result == 0:
            self.tokens += batch
            return
        if self.closing:
            raise EngineClosed("this engine was closed during a generation", fix="create a new one")
        self.keep(position)
        if result == 2:
            raise Cancelled
        if reason := self.context.controls().failure:
            raise EngineUnusable(f"the engine cannot compute any more: {reason}", fix="close it and create a new one")
        raise LlamaPhaseError(f"llama.cpp could not decode a batch of {len(batch)} tokens (code {result})")

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the common prefix, but the last of `tokens` is left to decode, for its logits. Returns n."""
        n = 0
        limit = min(len(self.tokens), len(tokens) - 1)
        while n < limit and self.tokens[n] == tokens[n]:
            n += 1
        return self.keep(n)

    def keep(self, n: int) -> int:
        """Hold the first n tokens only, or none: recurrent states and windows do not go back. Returns how many."""
        if self.closing:
            return 0
        if n == 0 or not self.context.keep(n):
            self.context.clear()
            n = 0
        del self.tokens[n:]
        return n
