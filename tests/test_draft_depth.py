"""Draft lengths chosen by measurement (LLAMA_PHASE_DRAFT=auto). The policy: engine/tests/test-draft-depth.cpp.

Greedy, on all-F32 models, against stock without speculation: any split. Which lengths come up depends on the machine,
so the tests check that enough of them did.
"""

from __future__ import annotations

import json
import re

import pytest
from engine_server import (
    MIN_TOKENS,
    PREFILL_UBATCH,
    SOME_OF_FOUR,
    Fleet,
    assert_same_but_for_ties,
    both,
    drafts_of,
    mtp,
)
from test_phase_routes import parse_prometheus

pytestmark = pytest.mark.engine

MODELS = ("qwen4exp-exact", "qwen35moe-exact")
NO_FLASH = ("-fa", "off")  # then F32 models are exact for any split of one prompt
SLOTS = {"EXPERT_SLOTS": "32", "RING": "auto"}


@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_whatever_is_drafted(fleet: Fleet, prompt, model: str) -> None:
    """Lengths that change all the time; figures and metrics agree."""
    auto = fleet.phase(model, *mtp(7), DRAFT="auto")
    for seed in (1, 2):
        tokens = prompt(model, 60, seed=seed)
        assert_same_but_for_ties(auto.complete(tokens, n=160).tokens, fleet.stock(model).complete(tokens, n=160))
    draft = auto.phase()["draft"]
    assert sum(n > 0 for n in draft["rounds"]) >= 3, "few lengths were tried, so this shows nothing"
    assert draft["drafted"] > draft["accepted"] > 0
    assert draft["slots"] == {}

    samples = parse_prometheus(auto.metrics_text())
    assert samples["llama_phase_draft_tokens_total"] == draft["drafted"]
    for length, n in enumerate(draft["rounds"]):
        assert samples[f'llama_phase_draft_rounds_total{{length="{length}"}}'] == n


@pytest.mark.parametrize("length", range(1, 8))
def test_same_tokens_at_each_length(fleet: Fleet, prompt, length: int) -> None:
    """A drafter that makes at most so many; the chosen length stays within that."""
    model = MODELS[length % 2]
    auto = fleet.phase(model, *mtp(length), DRAFT="auto")
    tokens = prompt(model, 50, seed=length)
    assert_same_but_for_ties(auto.complete(tokens, n=48).tokens, fleet.stock(model).complete(tokens, n=48))
    assert min(length, 3) < len(auto.phase()["draft"]["rounds"]) <= length + 1  # the first rounds try up to 3


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_at_fixed_lengths(fleet: Fleet, prompt, model: str, length: int) -> None:
    """Every round drafts so many, verified from expert slots, and some are rejected. Greedy, as without speculation;
    sampled, as stock with the same seed and drafts, whose recurrent state goes back as often."""
    slots = SLOTS | {"EXPERT_BATCH": str(length + 1)}
    fixed = fleet.phase(model, *mtp(length), "--no-repack", DRAFT="off", **slots)
    plain, drafting = fleet.stock(model, "--no-repack"), fleet.stock(model, "--no-repack", *mtp(length))
    tokens = prompt(model, 50, seed=length)
    greedy = fixed.complete(tokens, n=96)
    assert_same_but_for_ties(greedy.tokens, plain.complete(tokens, n=96))

    sampling = {"temperature": 1.0, "top_k": 40, "seed": 100 + length}
    sampled, of_stock = both(fixed, drafting, tokens, n=96, **sampling)
    assert sampled.tokens == of_stock.tokens != greedy.tokens
    for answer in (greedy, sampled):
        assert 0 < answer.timings["draft_n_accepted"] < answer.timings["draft_n"]
    assert "draft" not in fixed.phase() and fixed.phase()["experts"][0]["slots"]["looked_up"] > 0


@pytest.mark.parametrize("draft", ["auto", *range(1, 8)])
@pytest.mark.parametrize("model", MODELS)
def test_long_answers(fleet: Fleet, prompt, model: str, draft: int | str) -> None:
    """Twenty answers of 512 tokens for each model, verified from expert slots: all tokens are those of no speculation,
    and no tie is excused. A few prompts are long enough for the prefill phase."""
    longest = 7 if draft == "auto" else int(draft)
    slots = SLOTS | {"EXPERT_BATCH": str(longest + 1)}
    setting = "auto" if draft == "auto" else "off"
    flags = (*NO_FLASH, "--no-repack")
    drafting = fleet.phase(model, *flags, *mtp(longest), sizes={"ctx": 1024}, DRAFT=setting, **slots)
    plain = fleet.stock(model, *flags, ctx=1024)
    drafted = accepted = 0
    for i in range(6 if draft == "auto" else 2):
        tokens = prompt(model, (20, 70, 260)[(longest + i) % 3], seed=200 + 10 * longest + i)
        of_draft, of_none = both(drafting, plain, tokens, n=512, n_probs=0)
        assert of_draft.tokens == of_none.tokens
        assert len(of_draft.tokens) == 512
        drafted += int(of_draft.timings.get("draft_n", 0))  # a chosen length may be 0 for a whole answer
        accepted += int(of_draft.timings.get("draft_n_accepted", 0))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_goes_on(fleet: Fleet, prompt, model: str) -> None:
    """Prefix reuse: what was put off in the draft context is used when an answer is continued, or cut and continued."""
    auto, stock = fleet.phase(model, *mtp(7), DRAFT="auto"), fleet.stock(model)
    tokens = prompt(model, 80, seed=5)
    for cut in (0, 1, 3, 6, 30):
        answer = auto.complete(tokens, n=40, cache=True)
        assert_same_but_for_ties(answer.tokens, stock.complete(tokens, n=40))
        history = [*tokens, *answer.tokens]
        tokens = [*history[: len(history) - cut], *prompt(model, 12, seed=cut)]
    assert answer.n_cached > 0
    assert not re.search(r"could not decode|inconsistent|failed to", auto.log_text())


def test_transactions_and_slots(fleet: Fleet, prompt) -> None:
    """Long prompts between the drafts: the draft context enters and leaves with nothing put off."""
    model = MODELS[0]
    auto, stock = fleet.phase(model, *mtp(7), "--no-repack", DRAFT="auto", **SLOTS), fleet.stock(model)
    before = auto.counters()["left"]
    for n in (40, PREFILL_UBATCH + 60, 30, MIN_TOKENS):
        tokens = prompt(model, n, seed=n)
        assert_same_but_for_ties(auto.complete(tokens, n=48).tokens, stock.complete(tokens, n=48))
    assert auto.counters()["left"] - before == 2
    assert auto.phase()["draft"]["max_batch"] == 8


def test_two_slots_share_the_batch(fleet: Fleet, prompt) -> None:
    """Two answers at once, one of which starts with a long prompt while the other is being generated."""
    model = MODELS[0]
    auto = fleet.phase(model, *mtp(7), DRAFT="auto", sizes={"parallel": 2, "ctx": 4096})
    prompts = [prompt(model, n, seed=n) for n in (40, 600, 50, 300)]
    answers = auto.complete_all(prompts, n=64)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_same_but_for_ties(answer.tokens, fleet.stock(model).complete(tokens, n=64))
    assert auto.counters()["left"] == auto.counters()["entered"] > 0


@pytest.mark.parametrize("model", MODELS)
def test_until_the_context_is_full(fleet: Fleet, prompt, model: str) -> None:
    """These models cannot shift their context, so the answer ends with it; a verify batch that does not fit any more
    ends it a few tokens before, in stock too."""
    sizes = {"ctx": 256}
    auto = fleet.phase(model, *mtp(7), "--context-shift", DRAFT="auto", sizes=sizes)
    stock = fleet.stock(model, "--context-shift", **sizes)
    tokens = prompt(model, 150, seed=9)
    of_auto, of_stock = auto.complete(tokens, n=400), stock.complete(tokens, n=400)
    assert 0 <= len(of_stock.tokens) - len(of_auto.tokens) <= 7
    assert of_auto.tokens == of_stock.tokens[: len(of_auto.tokens)]
    assert_same_but_for_ties(auto.complete(tokens, n=40).tokens, stock.complete(tokens, n=40))


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 80, "maxLength": 300},
        "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 9},
    },
    "required": ["a", "b"],
}
FEW_VOWELS = 'root ::= ([^aeio] | "a" [^a-f])+'


@pytest.mark.parametrize("constraint", [{"json_schema": SCHEMA}, {"grammar": FEW_VOWELS}], ids=["schema", "grammar"])
@pytest.mark.parametrize("model", MODELS)
def test_a_grammar(fleet: Fleet, prompt, model: str, constraint: dict) -> None:
    """It rejects many drafts of these models, and not all: the text is that of no speculation, and it fits."""
    body = {"ignore_eos": False, "n_probs": 0}
    tokens = prompt(model, 40, seed=3)
    fixed, auto = fleet.phase(model, *mtp(3), DRAFT="off"), fleet.phase(model, *mtp(7), DRAFT="auto")
    stock = fleet.stock(model)
    expected = stock.post(tokens, 200, **body, **constraint).json()["content"]
    assert expected != stock.post(tokens, 200, **body).json()["content"], "it holds without a grammar, too"
    for server in (fixed, auto):
        answer = server.post(tokens, 200, **body, **constraint).json()
        assert answer["content"] == expected
        if server is fixed:  # a chosen length may be 0 for a whole answer
            assert 0 < answer["timings"]["draft_n_accepted"] < answer["timings"]["draft_n"]
    assert auto.phase()["draft"]["drafted"] > auto.phase()["draft"]["accepted"]
    if "grammar" in constraint:
        assert re.fullmatch("([^aeio]|a[^a-f])+a?", expected)
    else:
        made = json.loads(expected)
        assert len(made["a"]) >= 80 and isinstance(made["b"], list)


@pytest.mark.parametrize("model", MODELS)
def test_rejected_drafts_replay_nothing(fleet: Fleet, model: str, prompt) -> None:
    """Recurrent state goes back to a snapshot on the device: no checkpoint is restored, nothing is decoded twice."""
    server = fleet.fresh(
        model, "-c", "1024", "-np", "1", *mtp(5), env={"LLAMA_TRACE": "1", "LLAMA_PHASE_DRAFT": "auto"}
    )
    try:
        server.complete(prompt(model, 40), n=120)
        draft = server.phase()["draft"]
        log = server.log_text()
    finally:
        server.stop()
    partial = [
        (int(a), int(b)) for a, b in re.findall(r"accepted +(\d+)/ *(\d+) draft tokens$", log, re.MULTILINE) if a < b
    ]
    assert partial, "no draft was rejected, so this shows nothing"
    assert "restore checkpoint" not in log and "restoring speculative checkpoint" not in log
    assert draft["drafted"] - draft["accepted"] == sum(b - a for a, b in partial)


def test_sizes_that_come_back_find_their_graph(fleet: Fleet, prompt) -> None:
    """Each round drafts token by token and verifies four: all but the first of a size are reused, and without only
    those that follow one of their size. Of a fixed length, since how often a chosen one changes is the machine's. The
    text is the same."""
    model = MODELS[0]
    tokens = prompt(model, 40, seed=8)
    of_stock = fleet.stock(model).complete(tokens, n=160)
    reused: dict[str, list[float]] = {}
    for graphs, most in {"auto": 10, "1": 1, "0": 0}.items():
        server = fleet.phase(model, *mtp(3), DRAFT="off", GRAPHS=graphs)
        assert_same_but_for_ties(server.complete(tokens, n=160).tokens, of_stock)
        contexts = server.phase()["graphs"]
        assert all(of["kept"] <= most for of in contexts)
        reused[graphs] = [of["reused"] / of["batches"] for of in contexts]
    assert min(reused["auto"]) > 0.85  # the rest: the prompt, and the first of each size
    assert reused["1"][1] < 0.6 and reused["0"][1] < 0.6


@pytest.mark.parametrize("unified", ["-kvu", "-no-kvu"])
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
@pytest.mark.parametrize("length", [1, 3])
def test_drafts_of_some_of_the_slots_are_those_of_stock(
    fleet: Fleet, prompt, length: int, model: str, unified: str
) -> None:
    """A kept graph is planned for all four slots, and used for two and three of them, not always the same."""
    prompts = [prompt(model, n, seed=n) for n in (20, 100, 60)]
    flags, sizes = (unified, "--no-repack", *mtp(length)), {"ctx": 4096, "parallel": 4}
    kept, unkept = (fleet.phase(model, *flags, sizes=sizes, DRAFT="off", GRAPHS=graphs) for graphs in ("auto", "0"))
    stock = fleet.stock(model, *flags, **sizes)
    for n in SOME_OF_FOUR:
        answers = [server.complete_together(prompts[:n], 30) for server in (kept, unkept, stock)]
        assert answers[0] == answers[1] == answers[2]
        drafts = [drafts_of(one) for one in answers]
        assert drafts[0] == drafts[1] == drafts[2] and all(accepted for _, accepted in drafts[0])
    assert kept.phase()["graphs"][1]["kept"] > 0


@pytest.mark.parametrize(("model", "unified"), [("qwen4exp", "-kvu"), ("qwen35moe", "-no-kvu")])
def test_kept_graphs_of_some_of_the_slots(fleet: Fleet, prompt, model: str, unified: str) -> None:
    """Without drafts: answers of two and of three slots of four, which come back behind one alone."""
    prompts, sizes = [prompt(model, n, seed=n) for n in (20, 30, 40)], {"ctx": 4096, "parallel": 4}
    kept, unkept = (fleet.phase(model, unified, sizes=sizes, DRAFT="off", GRAPHS=graphs) for graphs in ("auto", "0"))
    for n in (*SOME_OF_FOUR, 1, *SOME_OF_FOUR):
        assert kept.complete_together(prompts[:n], 24) == unkept.complete_together(prompts[:n], 24)
    assert kept.phase()["graphs"][0]["kept"] > 1


def test_a_server_with_kept_graphs_ends_without_complaint(fleet: Fleet, prompt) -> None:
    """The context's own buffers are compared with what was planned when it goes; a kept graph may be in their place."""
    server = fleet.fresh(MODELS[0], "-c", "1024", "-np", "1", *mtp(3), env={"LLAMA_PHASE_DRAFT": "auto"})
    try:
        server.complete(prompt(MODELS[0], 40), n=80)
        assert any(graphs["kept"] for graphs in server.phase()["graphs"])
    finally:
        assert server.stop() == 0
    assert "does not match expectation" not in server.log_text()
