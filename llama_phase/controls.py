"""Phase control of a context in this process: ours, llama-cpp-python's, or any address."""

from __future__ import annotations

import contextlib
import ctypes
import json
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from llama_phase.engine_library import library_path, native
from llama_phase.errors import EngineClosed, UsageError
from llama_phase.phase_facts import PhaseEvent, PhaseStats

OnEvent = Callable[[PhaseEvent], object]


class PhaseControls:
    """The phases of one context. A context manager; `close` is idempotent and leaves the context alone.

    `stats`, `phase` and `failure` may be asked from any thread; the others belong to the thread that decodes.
    Everything raises EngineClosed once the context or these controls are closed.
    """

    def __init__(self, binding: Any):
        self._native = binding
        self._listeners: list[OnEvent] = []

    def __enter__(self) -> PhaseControls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the listeners off."""
        self._native.close()
        self._listeners.clear()

    @property
    def closed(self) -> bool:
        return self._native.closed

    @property
    def failure(self) -> str | None:
        """Why the context cannot compute any more, or None."""
        return self._native.failure

    def stats(self) -> PhaseStats:
        return PhaseStats(**self._native.stats())

    def phase(self) -> dict[str, Any]:
        """Everything, as GET /phase says it: transactions with their steps, slots and hits per layer, memory."""
        return json.loads(self._native.json())

    @contextlib.contextmanager
    def prompt(self, n_new: int, seq_id: int = 0) -> Iterator[int]:
        """Around the decoding of a prompt of `n_new` uncached tokens; gives the micro-batch in tokens.

        From its first use on, the context follows these blocks instead of watching batch sizes. An exception counts as
        a cancelled prompt. Raises EngineUnusable.
        """
        ubatch = self._native.prompt_begin(n_new, seq_id)
        try:
            yield ubatch
        except BaseException:
            if not self.closed:
                self._native.prompt_abort(seq_id)
            raise
        self._native.prompt_done(seq_id)

    def join(self, member: PhaseControls) -> bool:
        """Let `member` (a draft context, say) switch with this one. False: one of them cannot, or is in prefill."""
        return self._native.join(member._native)

    def reset(self) -> None:
        """Forget the failures after which a switch is not tried any more."""
        self._native.reset()

    def on_event(self, listener: OnEvent) -> Callable[[], None]:
        """Call `listener` after each transaction, on the thread that decodes; it must not use the context.

        What it raises goes to sys.unraisablehook and harms nothing. Returns a function that takes it off again.
        """
        if self.closed:
            raise EngineClosed("these controls are closed", fix="attach again to a living context")
        self._listeners.append(listener)
        self._native.set_callback(self._tell)

        def take_off() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return take_off

    @contextlib.contextmanager
    def events(self) -> Iterator[Iterator[PhaseEvent]]:
        """An iterator over the events since the block began; it ends when there is none left, and goes on later."""
        seen: queue.SimpleQueue[PhaseEvent] = queue.SimpleQueue()
        take_off = self.on_event(seen.put)

        class Events:
            def __iter__(self) -> Iterator[PhaseEvent]:
                return self

            def __next__(self) -> PhaseEvent:
                try:
                    return seen.get_nowait()
                except queue.Empty:
                    raise StopIteration from None

        try:
            yield Events()
        finally:
            take_off()

    def _tell(self, event: dict[str, Any]) -> None:
        failed: Exception | None = None
        for listener in list(self._listeners):
            try:
                listener(PhaseEvent(**event))
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


_attached: weakref.WeakKeyDictionary[Any, PhaseControls] = weakref.WeakKeyDictionary()


def attach(llm: Any) -> PhaseControls:
    """Controls of a `llama_cpp.Llama`, a `llama_phase.Engine`, or the address (int) of a llama_context.

    A Llama's controls end with it; an address has to stay valid until they are closed. Raises UsageError when the
    object is none of these or its llama.cpp is not this engine's, EngineClosed when it is closed.
    """
    binding = native()
    if isinstance(llm, int):
        return PhaseControls(binding.Controls(llm))
    if hasattr(llm, "controls"):
        return llm.controls
    inner = getattr(llm, "_ctx", None)
    if inner is None or not hasattr(inner, "_exit_stack"):
        raise UsageError(
            f"{type(llm).__name__} is no Llama of llama-cpp-python", fix="give a Llama, an Engine, or an address"
        )
    if inner.ctx is None:
        raise EngineClosed("this Llama is closed", fix="create a new one")
    _check_same_library(binding)
    known = _attached.get(llm)
    if known is None or known.closed:
        address = inner.ctx if isinstance(inner.ctx, int) else ctypes.cast(inner.ctx, ctypes.c_void_p).value
        known = _attached[llm] = PhaseControls(binding.Controls(address))
        # runs before the context is freed, which these controls must not outlive
        inner._exit_stack.callback(known.close)
    return known


def _check_same_library(binding: Any) -> None:
    """An address made by one library must not get to another one, whose types differ behind the same names."""
    from llama_cpp import llama_cpp

    symbol = getattr(llama_cpp._lib, "llama_phase_current", None)
    if symbol is None or ctypes.cast(symbol, ctypes.c_void_p).value != binding.symbol_address():
        raise UsageError(
            f"llama-cpp-python uses {llama_cpp._lib._name}, not the engine of llama-phase",
            fix=f"set LLAMA_CPP_LIB_PATH={library_path()} before llama_cpp is imported",
        )
