"""Part `drafts` of gpu_engine.py: speculation verified from expert slots, of fixed and of chosen lengths, two slots.

All-F32 models, against the tokens of stock code without speculation, all weights on the GPU. A batch of several tokens
is computed by other kernels than one token, from four on in TF32, and where the router then chooses another expert,
more than last digits differ. So another token is a tie where stock's is less than TIE the likelier; behind it stock is
asked again, and at most TIES_PERCENT of the tokens may be ties. What a wrong expert, a wrong row of K/V or a state that
was not put back does is larger, or goes on to the end of the answer. (Two experts of one layer in each other's place:
1.5 within 20 tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scored import Likeliest, likeliest, ties
from served import PHASE, PREFILL_UBATCH, STOCK, complaints, logged, prompt_of, served, together
from synth_gguf import make_model

from llama_phase.client import Client

# more experts than slots, and text of which a third is hard to tell
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen4exp": ("tiny-exact", {"experts": 64, "bigram": 6.5}),
    "qwen35moe": ("tiny-35-exact", {"experts": 64, "bigram": 6.5}),
}
LENGTHS: dict[str, tuple[int | str, ...]] = {"qwen4exp": (1, 3, 7, "auto"), "qwen35moe": (7, "auto")}
LONGEST = 7
SLOTS = {"expert_slots": 32, "expert_batch": LONGEST + 1, "ring": 2}
FLAGS = ("-np", "2", "--no-repack", "--cache-ram", "0")
ALONE = (1, 300, PREFILL_UBATCH + 200)  # tokens of a prompt
AT_ONCE = (310, 900)  # the first is answered while the second is streamed
ANSWER_TOKENS = 96
TIE = 1.0  # of a log-probability; half of the tokens are likelier than the next by more than 2.5
TIES_PERCENT = 3


def plain(client: Client, n_prompt: int, tokens: Sequence[int] = (), n: int = ANSWER_TOKENS) -> list[Likeliest]:
    """Without speculation, behind that prompt and these tokens."""
    prompt = [*prompt_of(n_prompt), *tokens]
    return likeliest(client.completion(prompt, n, cache_prompt=False, n_probs=16, ignore_eos=True).probabilities)


def check_drafts(name: str, models: Path, split: tuple[str, ...] = ()) -> list[str]:
    preset, overrides = MODELS[name]
    model = make_model(preset, models / f"drafts-{preset}.gguf", **overrides)
    failures = []
    with served(model, STOCK, (*FLAGS, *split)) as stock:
        expected = {n_prompt: plain(stock, n_prompt) for n_prompt in (*ALONE, *AT_ONCE)}
        for length in LENGTHS[name]:
            wrong, detail = with_length(model, length, split, stock, expected)
            print(f"{name:12} drafts of {length!s:4} {'WRONG ' + wrong[0] if wrong else 'the same text':40} {detail}",
                  flush=True)  # fmt: skip
            failures += [f"{name}, drafts of {length}: {text}" for text in wrong]
    return failures


def with_length(
    model: Path, length: int | str, split: tuple[str, ...], stock: Client, expected: dict[int, list[Likeliest]]
) -> tuple[list[str], str]:
    """What is wrong, and what was seen."""
    chosen = length == "auto"
    settings = {**PHASE, **SLOTS, "draft": "auto" if chosen else "off"}
    flags = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(LONGEST if chosen else length), "--cpu-moe")
    asked = {"cache_prompt": False, "ignore_eos": True}
    with logged(model, settings, (*flags, *FLAGS, *split)) as (client, log):
        loaded_bytes = log.stat().st_size
        answers = [client.completion(prompt_of(n_prompt), ANSWER_TOKENS, **asked) for n_prompt in ALONE]
        timings = [answer.timings for answer in answers]
        texts = [(n_prompt, answer.tokens) for n_prompt, answer in zip(ALONE, answers, strict=True)]
        both = together(client, [prompt_of(n_prompt) for n_prompt in AT_ONCE], ANSWER_TOKENS, **asked)
        timings += [reply["timings"] for reply in both]
        texts += [(n_prompt, reply["tokens"]) for n_prompt, reply in zip(AT_ONCE, both, strict=True)]
        phase = client.phase() or {}
        wrong = complaints(log.read_bytes()[loaded_bytes:].decode(errors="replace"))
    gaps: list[float] = []
    n_tokens = len(texts) * ANSWER_TOKENS
    for n_prompt, tokens in texts:
        if len(tokens) != ANSWER_TOKENS:
            wrong.append(f"prompt {n_prompt}: {len(tokens)} tokens")
            continue
        for gap in ties(tokens, expected[n_prompt], partial(plain, stock, n_prompt)):
            gaps.append(gap)
            if gap >= TIE or 100 * len(gaps) > TIES_PERCENT * n_tokens:
                wrong.append(f"prompt {n_prompt}: {len(gaps)} other tokens, stock's likelier by {gap:.3f}")
                break  # asking again for each would take minutes
    drafted, accepted = (sum(int(t.get(what, 0)) for t in timings) for what in ("draft_n", "draft_n_accepted"))
    if not 0 < accepted < drafted:
        wrong.append(f"{accepted} of {drafted} drafts accepted")
    looked_up = [member["slots"]["looked_up"] for member in phase["experts"]]
    if len(looked_up) != 2 or not all(looked_up):
        wrong.append(f"slots were not used: {looked_up}")
    counters = phase["counters"]
    if not counters["left"] == counters["entered"] > 0:
        wrong.append(f"counters {counters}")
    rounds = phase.get("draft", {}).get("rounds", [])
    if chosen and sum(n > 0 for n in rounds) < 3:
        wrong.append(f"rounds by length {rounds}")
    return wrong, (
        f"{len(gaps)} ties of {n_tokens}, up to {max(gaps, default=0):.4f}; {accepted} of {drafted} accepted; "
        f"rounds {rounds}; looked up {looked_up}"
    )
