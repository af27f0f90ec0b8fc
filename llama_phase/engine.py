"""A model in this process: generate, stream, tokenize, and the phases underneath."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil

from llama_phase.async_bridge import iterate_in_thread
from llama_phase.controls import PhaseControls
from llama_phase.engine_library import native
from llama_phase.engine_settings import EngineOptions, load_settings
from llama_phase.errors import EngineBusy, EngineClosed, ModelError, UsageError
from llama_phase.generation import Chunk, Completion, Progress, Prompt, Request, collect
from llama_phase.phase_facts import PhaseStats
from llama_phase.process_environment import environment
from llama_phase.sequence import Cancelled, HeldSequence
from llama_phase.settings import Settings
from llama_phase.text_pieces import TextPieces

CLOSE_AT_EXIT_S = 5.0
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """One model, one context, one sequence. A context manager; `close` is idempotent.

    One generation at a time: a second one, from whatever thread, is refused with EngineBusy. `stats`, `phase`,
    `cancel` and `close` may be called from any thread. After a fork the child has to create its own.
    """

    def __init__(self, model: str | os.PathLike[str], settings: Settings | None = None, **keywords: Any):
        """Load `model` (GGUF). Keywords: the fields of EngineOptions (`gpu_layers`, `cpu_experts`, ...) and, unless
        `settings` is given, those of the settings that matter here (`ctx`, `ubatch`, `expert_slots`, ...).

        Raises TypeError (unknown keyword, with the nearest name), UsageError, ModelError, MissingPrerequisite.
        """
        path = Path(model)
        options, settings = load_settings(path, settings, keywords)
        if not path.is_file():
            raise ModelError(f"{path} is not a file", fix="give the path of a GGUF file")
        threads = options.threads or psutil.cpu_count(logical=False) or 1
        self._binding = native()
        self._binding.set_log_level(EngineOptions.LOG_LEVEL[options.verbose])
        self.settings = settings
        with environment(settings) as variables:
            self._check(variables)
            self._model = self._binding.Model(
                str(path), options.gpu_layers, options.cpu_experts, repack=settings.expert_slots == 0
            )
            try:
                self._context = self._binding.Context(
                    self._model,
                    n_ctx=settings.ctx or 0,
                    n_batch=settings.effective_batch or 2048,
                    n_ubatch=settings.ubatch,
                    n_threads=threads,
                    n_threads_batch=options.threads_batch or threads,
                    trace_routing=options.trace_routing,
                )
            except BaseException:
                self._model.close()
                raise
        self.controls = PhaseControls(self._context.controls())
        self._n_ctx: int = self._context.n_ctx
        self._pid = os.getpid()
        self._sequence = HeldSequence(self._context)
        self._generating = threading.Lock()
        self._cancelled = False
        _open.add(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End a generation in progress (it raises EngineClosed) and free model and context."""
        self._close(None)

    @property
    def closed(self) -> bool:
        return self._sequence.closing or self._context.closed

    @property
    def n_ctx(self) -> int:
        """Tokens the context holds."""
        self._require_usable()
        return self._n_ctx

    def stats(self) -> PhaseStats:
        """The counters, and the phase now."""
        return self.controls.stats()

    def phase(self) -> dict[str, Any]:
        """Everything, as GET /phase says it: transactions with their steps, slots and hits per layer, memory."""
        return self.controls.phase()

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, as llama-server makes them."""
        self._require_usable()
        return self._model.tokenize(text, add_special, True)

    def detokenize(self, tokens: list[int]) -> str:
        """Text of token ids; bytes that make no character are replaced."""
        self._require_usable()
        return b"".join(self._model.piece(token) for token in tokens).decode(errors="replace")

    def cancel(self) -> None:
        """End the generation in progress with what it has; nothing happens without one. From any thread."""
        if self._generating.locked() and not self.closed:
            self._cancelled = True
            self._context.cancel(True)

    def generate(
        self,
        prompt: Prompt,
        n_predict: int = 128,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        **keywords: Any,
    ) -> Completion:
        """Answer `prompt` (text or token ids). Keywords are the fields of generation.Request; greedy by default.

        Raises TypeError for an unknown keyword, UsageError, EngineBusy, EngineClosed, EngineUnusable. An exception that
        passes, KeyboardInterrupt included, leaves the engine usable.
        """
        keywords.setdefault("progress", on_progress is not None)
        with contextlib.closing(self.stream(prompt, n_predict, **keywords)) as chunks:
            return collect(chunks, on_progress)

    def stream(self, prompt: Prompt, n_predict: int = 128, **keywords: Any) -> Generator[Chunk, None, None]:
        """Like `generate`, token by token. `progress=True` adds a chunk per batch of the prompt. Closing it cancels."""
        request = Request.of(n_predict, keywords)
        self._require_usable()
        return self._run(prompt, request)

    async def generate_async(self, prompt: Prompt, n_predict: int = 128, **keywords: Any) -> Completion:
        """`generate` in a thread. Cancelling the task cancels the generation."""
        async with contextlib.aclosing(self.stream_async(prompt, n_predict, **keywords)) as chunks:
            return collect([chunk async for chunk in chunks])

    def stream_async(self, prompt: Prompt, n_predict: int = 128, **keywords: Any) -> AsyncGenerator[Chunk, None]:
        """`stream` in a thread. Closing the iterator, or cancelling the task, cancels the generation."""
        request = Request.of(n_predict, keywords)
        self._require_usable()
        return iterate_in_thread(lambda: self._run(prompt, request), self.cancel)

    def take_routing(self) -> list[tuple[int, list[list[int]]]]:
        """(layer, expert ids of each token) per layer and micro-batch since the last call; with `trace_routing`."""
        self._require_usable()
        return self._context.take_routing()

    def _run(self, prompt: Prompt, request: Request) -> Generator[Chunk, None, None]:
        with self._exclusively():
            tokens = self._model.tokenize(prompt, True, True) if isinstance(prompt, str) else list(prompt)
            if not tokens:
                raise UsageError("the prompt is empty", fix="give at least one token")
            if len(tokens) >= self.n_ctx:
                raise UsageError(
                    f"the prompt has {len(tokens)} tokens, the context holds {self.n_ctx}",
                    fix="raise ctx, or shorten the prompt",
                )
            started = time.perf_counter()
            n_cached = self._sequence.reuse(tokens) if request.cache_prompt else self._sequence.keep(0)
            try:
                yield from self._read(tokens, n_cached, started, request.progress)
                yield from self._answer(request, started, n_cached, len(tokens) - n_cached)
            except Cancelled:
                yield Chunk("", [], True, {}, stop_type="cancelled")

    def _read(self, tokens: list[int], n_cached: int, started: float, report: bool) -> Iterator[Chunk]:
        """The prompt, in logical batches, within the phase that suits it."""
        step = self._context.n_batch
        with self.controls.prompt(len(tokens) - n_cached):
            for begin in range(n_cached, len(tokens), step):
                self._sequence.append(tokens[begin : begin + step])
                if report:
                    ms = (time.perf_counter() - started) * 1000
                    yield Chunk(
                        "", [], False, {}, progress=Progress(len(tokens), n_cached, len(self._sequence.tokens), ms)
                    )

    def _answer(self, request: Request, started: float, n_cached: int, n_prompt: int) -> Iterator[Chunk]:
        seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(4), "little")
        sampler = self._binding.Sampler(
            self._model,
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            seed & 0xFFFFFFFF,
            never=self._model.end_tokens if request.ignore_eos else [],
        )
        prompted = time.perf_counter()
        pieces = TextPieces(self._model.piece, request.stop)
        n = token = 0
        stop_type = "limit"
        try:
            while n != request.n_predict and not (n and len(self._sequence.tokens) >= self.n_ctx):
                if self._cancelled:
                    raise Cancelled
                if n:
                    self._sequence.append([token])
                token = self._context.sample(sampler)
                n += 1
                ended = self._model.is_end(token)
                text = "" if ended else pieces.add(token)
                yield Chunk(text, [token], False, {})
                if ended or pieces.stopped:
                    stop_type = "eos" if ended else "word"
                    break
        except Cancelled:
            stop_type = "cancelled"
        yield Chunk(pieces.rest(), [], True, _timings(started, prompted, n_cached, n_prompt, n), stop_type=stop_type)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        self._require_usable()
        if not self._generating.acquire(blocking=False):
            raise EngineBusy(
                "another generation is in progress on this engine",
                fix="finish or close its stream, or create one Engine per thread",
            )
        try:
            self._cancelled = False
            self._context.cancel(False)
            yield
        finally:
            self._generating.release()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed(f"this engine belongs to process {self._pid}, which forked", fix="create a new one")
        if self.closed:
            raise EngineClosed("this engine is closed", fix="create a new one")

    def _check(self, variables: dict[str, str]) -> None:
        """The engine itself ends the process for a bad variable; here it is an exception."""
        try:
            self._binding.check_environment(list(variables.items()))
        except ValueError as error:
            raise UsageError(str(error), fix="`llama-phase env` says what is accepted") from None

    def _close(self, timeout_s: float | None) -> bool:
        """False: another thread is inside llama.cpp still."""
        if self._context.closed or os.getpid() != self._pid:
            return True
        if self._sequence.decoding == threading.get_ident():
            raise EngineBusy("close() inside a callback of a decode", fix="close it after the call has returned")
        self._sequence.closing = True
        self._context.cancel(True)
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while True:
            try:
                self._context.close()
                break
            except EngineBusy:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
        self.controls.close()
        self._model.close()
        return True


def _timings(started: float, prompted: float, n_cached: int, n_prompt: int, n: int) -> dict[str, float]:
    """As llama-server reports them."""
    prompt_ms, predicted_ms = (prompted - started) * 1000, (time.perf_counter() - prompted) * 1000
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1000 * n_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": n,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1000 * n / predicted_ms if predicted_ms else 0.0,
    }


@atexit.register
def _close_all() -> None:
    """Before the interpreter is taken down: a destructor that runs later frees nothing any more."""
    for engine in list(_open):
        with contextlib.suppress(Exception):
            engine._close(CLOSE_AT_EXIT_S)
