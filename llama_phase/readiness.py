"""The proof that a server can serve: a real prompt, at least one prefill micro-batch long, and a token of an answer.

`/health` says that the weights are loaded. Whether the compute buffers of a whole micro-batch fit beside them, and
whether the switch of phase comes back, shows at the first long prompt only: this is that prompt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from llama_phase.client import Client, RequestFailed
from llama_phase.errors import ServerStartError

_TEXT = "The quick brown fox jumps over the lazy dog. 0123456789 "
_MORE = 8  # the server keeps the last 4 tokens of a prompt for a batch of their own
_UNAVAILABLE = 503
_NO_COMPLETIONS = 501  # a server for embeddings or reranking


class ProbeFailed(ServerStartError):
    """The first prompt was not answered as a working server does. `kind` as in crash.KINDS; `dying`: the server may be
    about to end for the same reason, with an exit code that says more."""

    def __init__(self, message: str, *, kind: str = "probe", fix: str = "", dying: bool = False):
        super().__init__(message, fix=fix)
        self.kind, self.dying = kind, dying


@dataclass(frozen=True)
class ProbePlan:
    """`n_tokens` of the prompt; `switches`: it has to go through the transaction."""

    n_tokens: int
    switches: bool


def plan_probe(phase: dict[str, Any] | None, ubatch: int, n_ctx: int | None) -> ProbePlan:
    """What the first prompt has to be, from the engine's own report (None: no phases) and the context of one slot in
    tokens (None: unknown). Never more than fits, and at least one token."""
    phase = phase or {}
    on = phase.get("mode", "off") == "transaction"
    n_wanted, min_tokens = ubatch, 0
    if on:
        ubatch, min_tokens = int(phase.get("ubatch", {}).get("prefill", ubatch)), int(phase.get("min_tokens", 0))
        n_wanted = max(ubatch, min_tokens)
    n_tokens = n_wanted + _MORE
    if n_ctx is not None:
        n_tokens = min(n_tokens, n_ctx - _MORE)
    n_tokens = max(1, n_tokens)
    return ProbePlan(n_tokens, on and n_tokens >= min_tokens)


def prove(client: Client, ubatch: int) -> float | None:
    """Send the prompt; the seconds it took, or None for a server that answers no prompts at all.

    `ubatch` is the micro-batch in tokens of a server without phases. Raises ProbeFailed, and RequestFailed when there
    is no answer at all. Waits as long as it takes: whether the server still lives is for others to watch.
    """
    before = client.phase(timeout_s=None)
    plan = plan_probe(before, ubatch, _context_of_a_slot(client))
    words = client.tokenize(_TEXT, add_special=False) or [0]
    prompt = (words * (plan.n_tokens // len(words) + 1))[: plan.n_tokens]
    began_s = time.monotonic()
    try:
        answer = client.completion(prompt, 1, cache_prompt=False, ignore_eos=True)
    except RequestFailed as error:
        if error.status == _NO_COMPLETIONS:
            return None
        if error.status == 0:
            raise
        dying = error.status == _UNAVAILABLE
        raise ProbeFailed(f"the first prompt of {plan.n_tokens} tokens failed: {error}", dying=dying) from None
    seconds = time.monotonic() - began_s
    if not answer.tokens and not answer.text:
        raise ProbeFailed(f"the first prompt of {plan.n_tokens} tokens was answered without a token")
    if plan.switches:
        _check_transaction(before or {}, client.phase(timeout_s=None) or {})
    return round(seconds, 3)


def _check_transaction(before: dict[str, Any], after: dict[str, Any]) -> None:
    def more(name: str) -> int:
        return after.get("counters", {}).get(name, 0) - before.get("counters", {}).get(name, 0)

    if after.get("failure"):
        raise ProbeFailed(f"the engine cannot go on: {after['failure']}", kind="oom_transaction", dying=True)
    if more("entered") > 0 and more("left") > 0:
        return
    reason = after.get("last_failure") or "the engine does not say why"
    raise ProbeFailed(
        f"the prefill phase could not be entered by the first prompt: {reason}",
        kind="oom_transaction",
        fix="lower LLAMA_PHASE_PREFILL_UBATCH (auto: what fits) or the context (-c), or LLAMA_PHASE_PREFILL_MODE=off",
    )


def _context_of_a_slot(client: Client) -> int | None:
    try:
        value = client.props(timeout_s=None).get("default_generation_settings", {}).get("n_ctx")
    except RequestFailed as error:
        if error.status == 0:
            raise
        return None
    return int(value) if value else None
