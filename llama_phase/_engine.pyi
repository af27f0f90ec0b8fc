"""
The engine's C API and its pure modules. People use llama_phase.Engine, attach, environment and sim instead.
"""
from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['Context', 'Controls', 'MAX_IDS', 'Model', 'Sampler', 'SlotPolicy', 'check_environment', 'exit_code', 'prometheus', 'run_transaction', 'set_log_level', 'symbol_address']
class SlotPolicy:
    """
    Which expert of one layer sits in which slot: the LRU that the engine runs, without weights.
    """
    def __init__(self, n_expert: typing.SupportsInt | typing.SupportsIndex, n_slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def clear(self) -> None:
        """
        Forget experts and counters.
        """
    def fetch(self, ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[int]:
        """
        Slots of the experts `ids` (one batch; repeats allowed), the missing ones brought in. Raises ValueError for an id out of
        range, more than MAX_IDS ids, or more different ones than there are slots.
        """
    def fill(self, experts: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        """
        Forget all, then hold `experts`, the least recently used first; the last n_slots of them.
        """
    def replay(self, steps: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]) -> None:
        """
        One fetch per entry; see `fetch`.
        """
    @property
    def evicted(self) -> int:
        """
        Copies that overwrote another expert.
        """
    @property
    def jobs(self) -> list[tuple[int, int]]:
        """
        (expert, slot) pairs that the last fetch copied.
        """
    @property
    def looked_up(self) -> int:
        """
        Ids so far.
        """
    @property
    def missed(self) -> int:
        """
        Experts copied so far.
        """
    @property
    def n_expert(self) -> int:
        ...
    @property
    def n_slots(self) -> int:
        ...
    @property
    def resident(self) -> list[int]:
        """
        Experts held, the least recently used first.
        """
    @property
    def runs(self) -> int:
        """
        Fetches so far.
        """
class Controls:
    """
    The phases of one llama_context. `address` has to stay the address of a living context until close().
    """
    def __init__(self, address: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self) -> None:
        """
        Take the callback off. Idempotent.
        """
    def join(self, member: Controls) -> bool:
        """
        Let the other context switch with this one. False: one of them has no phases, or is in prefill.
        """
    def json(self) -> str:
        """
        What GET /phase says, as JSON text.
        """
    def prompt_abort(self, seq_id: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        The prompt was cancelled; nothing happens without one. Raises EngineUnusable.
        """
    def prompt_begin(self, n_new: typing.SupportsInt | typing.SupportsIndex, seq_id: typing.SupportsInt | typing.SupportsIndex = 0) -> int:
        """
        A prompt of `n_new` uncached tokens begins. Returns the micro-batch in tokens. Raises EngineUnusable.
        """
    def prompt_done(self, seq_id: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        The prompt has been decoded; call it before its first token is sampled. Raises EngineUnusable.
        """
    def reset(self) -> None:
        """
        Forget the failures after which a switch is not tried any more.
        """
    def set_callback(self, function: typing.Any) -> None:
        """
        `function(event: dict)` on the thread that decodes; it must not use the context. What it raises goes to sys.unraisablehook.
        """
    def stats(self) -> dict:
        """
        The counters of llama_phase_stats (tokens, milliseconds, bytes).
        """
    @property
    def closed(self) -> bool:
        ...
    @property
    def failure(self) -> str | None:
        """
        Why the context cannot compute any more, or None.
        """
class Model:
    """
    A GGUF file, loaded. Raises ModelError with llama.cpp's reason.
    """
    def __init__(self, path: str, n_gpu_layers: typing.SupportsInt | typing.SupportsIndex = 0, cpu_experts: bool = False, repack: bool = True, mmap: bool = True) -> None:
        ...
    def close(self) -> None:
        """
        Give the weights up; they go with the last context that uses them. Idempotent.
        """
    def is_end(self, token: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether the token ends an answer.
        """
    def piece(self, token: typing.SupportsInt | typing.SupportsIndex, special: bool = False) -> bytes:
        """
        The bytes of a token; several may make one character.
        """
    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """
        Token ids of a text.
        """
    @property
    def end_tokens(self) -> list[int]:
        """
        Tokens that end an answer.
        """
    @property
    def n_vocab(self) -> int:
        ...
class Sampler:
    """
    Greedy at temperature 0, else llama-server's order: top_k, top_p, min_p, temperature, draw.
    """
    def __init__(self, model: Model, temperature: typing.SupportsFloat | typing.SupportsIndex = 0.0, top_k: typing.SupportsInt | typing.SupportsIndex = 40, top_p: typing.SupportsFloat | typing.SupportsIndex = 0.949999988079071, min_p: typing.SupportsFloat | typing.SupportsIndex = 0.05000000074505806, seed: typing.SupportsInt | typing.SupportsIndex = 0, never: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = []) -> None:
        ...
class Context:
    """
    Sequence 0 of a llama_context. One thread at a time (EngineBusy); the GIL is released while it computes.
    """
    def __init__(self, model: Model, n_ctx: typing.SupportsInt | typing.SupportsIndex = 0, n_batch: typing.SupportsInt | typing.SupportsIndex = 2048, n_ubatch: typing.SupportsInt | typing.SupportsIndex = 512, n_threads: typing.SupportsInt | typing.SupportsIndex = 0, n_threads_batch: typing.SupportsInt | typing.SupportsIndex = 0, trace_routing: bool = False) -> None:
        ...
    def cancel(self, wanted: bool = True) -> None:
        """
        End the decode in progress and all further ones, until cancel(False). From any thread.
        """
    def clear(self) -> None:
        """
        Forget all tokens.
        """
    def close(self) -> None:
        """
        Free it. Idempotent; EngineBusy while another thread decodes.
        """
    def controls(self) -> Controls:
        """
        The phases of this context.
        """
    def decode(self, tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], position: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Decode token ids at `position` (tokens), at most n_batch. Returns 0, 1 (the context is full), 2 (ended by cancel) or less than 0
        (failed). What a signal handler raises meanwhile (KeyboardInterrupt) ends it and is raised.
        """
    def keep(self, n: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Forget what is behind the first n tokens. False: this model cannot, nothing changed.
        """
    def sample(self, sampler: Sampler) -> int:
        """
        The next token, from the logits of the last token decoded.
        """
    def take_routing(self) -> list[tuple[int, list[list[int]]]]:
        """
        (layer, [[expert ids] per token]) of every layer and micro-batch since the last call; with trace_routing.
        """
    def top_logprobs(self, n: typing.SupportsInt | typing.SupportsIndex) -> list[tuple[int, float]]:
        """
        (token, log-probability) of the likeliest n next tokens.
        """
    @property
    def address(self) -> int:
        """
        Of the llama_context, for other bindings.
        """
    @property
    def closed(self) -> bool:
        ...
    @property
    def n_batch(self) -> int:
        """
        Tokens of one decode.
        """
    @property
    def n_ctx(self) -> int:
        """
        Tokens it holds.
        """
def check_environment(variables: collections.abc.Sequence[tuple[str, str]]) -> None:
    """
    Parse LLAMA_PHASE_* as the engine will: (name, value) pairs. Raises ValueError naming the variable and what is accepted.
    """
def exit_code() -> int:
    """
    75 once any context of this process became unusable, else 0.
    """
def prometheus() -> str:
    """
    The metrics of the oldest living context with phases; empty without one.
    """
def run_transaction(steps: collections.abc.Sequence[tuple[str, typing.Any, str, typing.Any]], faults: collections.abc.Sequence[tuple[str, typing.SupportsInt | typing.SupportsIndex]] = [], clock: typing.Any = None) -> dict:
    """
    Run steps with an undo journal, as the engine switches phases. `steps`: (name, act, undo_name, undo), act and undo without
    arguments, returning bytes allocated (> 0), freed (< 0) or None; an exception fails the step. `faults`: (name, n) makes the
    n-th run of a step fail (0: every one). `clock`: milliseconds. Returns outcome (committed, rolled back, broken), failed_step,
    reason, ms and steps. What is no Exception (KeyboardInterrupt) is rolled back and raised again.
    """
def set_log_level(level: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    What llama.cpp prints on stderr from now on: 1 debug, 2 info, 3 warnings, 4 errors, 5 nothing. Process-wide.
    """
def symbol_address() -> int:
    """
    Where llama_phase_current is, to tell whether another binding in this process uses the same library.
    """
MAX_IDS: int = 1024
