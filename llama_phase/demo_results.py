"""What the demo measured: which tokens agree with which, the table, and the words around it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from llama_phase.bench import median
from llama_phase.demo_plan import (
    ALL_ON_GPU,
    ANSWER_TOKENS,
    DECODE_UBATCH,
    LONG_TOKENS,
    PREFILL_UBATCH,
    SHORT_TEXTS,
    DemoModel,
)
from llama_phase.engine_id import EngineInfo
from llama_phase.prompt_texts import PROMPT_TEXTS

COUNTERS = ("entered", "left", "rolled_back")


@dataclass(frozen=True)
class Answer:
    """One answer to text number `text` of a kind, short or long. `ubatch`: the micro-batch that the prompt ran at.

    Seconds to the first token are the client's, speeds the server's.
    """

    kind: str
    text: int
    ubatch: int
    first_token_s: float
    prompt_per_second: float
    predicted_per_second: float
    tokens: tuple[int, ...]
    content: str = ""


@dataclass
class Run:
    """What one server gave. `counters` cover the counted texts; None for stock."""

    name: str
    answers: list[Answer]
    counters: dict[str, int] | None = None
    reference_for: int = 0  # the micro-batch whose tokens this run vouches for; 0: none
    compared: int = 0  # this and the next are filled by `compare`
    differing: list[str] = field(default_factory=list)


def compare(runs: Sequence[Run]) -> None:
    """Hold each answer of the runs with phases against the reference for its micro-batch, where there is one."""
    expected = {
        (run.reference_for, answer.kind, answer.text): answer.tokens
        for run in runs
        if run.reference_for
        for answer in run.answers
    }
    for run in runs:
        if run.counters is None:
            continue
        run.compared, run.differing = 0, []
        for answer in run.answers:
            reference = expected.get((answer.ubatch, answer.kind, answer.text))
            if reference is None:
                continue
            run.compared += 1
            if not reference or reference != answer.tokens:
                run.differing.append(f"{answer.kind} prompt {answer.text + 1} at micro-batch {answer.ubatch}")


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Cells of the table, one row a run: name, medians, counters, verdict."""
    out = []
    for run in runs:
        long, short = ([answer for answer in run.answers if answer.kind == kind] for kind in ("long", "short"))
        row = [
            run.name,
            _number(median(answer.prompt_per_second for answer in long), 0),
            _number(median(answer.first_token_s for answer in long), 2),
            _number(median(answer.first_token_s for answer in short), 2),
            _number(median(answer.predicted_per_second for answer in short), 1),
        ]
        if run.counters is not None:
            row += [" / ".join(str(run.counters[name]) for name in COUNTERS), _verdict(run)]
        out.append(row)
    return out


def _verdict(run: Run) -> str:
    if not run.compared:
        return "?"
    same = run.compared - len(run.differing)
    return f"{'NO' if run.differing else 'yes'}, {same}/{run.compared}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def make_table(results: Mapping[str, Sequence[Run]]) -> Table:
    """`results`: runs by the model's name. 80 columns are enough."""
    table = Table(box=box.HORIZONTALS, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (
        "prefill\ntok/s",
        "first\ntoken\nlong, s",
        "first\ntoken\nshort, s",
        "decode\ntok/s",
        "entered/\nleft/\nrolled back",
        "tokens\nidentical",
    ):
        table.add_column(name, justify="right")
    for model, runs in results.items():
        table.add_row(f"[bold]{model}[/]")
        for row in rows(runs):
            table.add_row(*row)
        table.add_section()
    return table


def failures(results: Mapping[str, Sequence[Run]]) -> list[str]:
    """`model, server: what is wrong`, one line a run: answers that differ, or no transaction tried at all."""
    wrong = []
    for model, runs in results.items():
        for run in runs:
            if run.differing:
                which = ", ".join(run.differing)
                wrong.append(f"{model}, {run.name}: other tokens than stock at the same split: {which}")
            elif run.counters is not None and not run.counters["entered"] + run.counters["rolled_back"]:
                wrong.append(f"{model}, {run.name}: no long prompt entered the prefill phase")
    return wrong


def opening(models: Sequence[DemoModel], engine: EngineInfo, stock: EngineInfo | None, threads: int) -> list[str]:
    """What is about to be compared."""
    unpatched = "llama.cpp without our patches"
    reference = unpatched if stock else f"this engine with phases off (`make stock` builds {unpatched})"
    return [
        f"engine: {engine}, {threads} threads",
        "models: " + ", ".join(f"{model.name} ({model.about})" for model in models),
        f"stock {DECODE_UBATCH}, stock {PREFILL_UBATCH}: {reference}, at that micro-batch",
        f"phase {DECODE_UBATCH}/{PREFILL_UBATCH}: engine at {PREFILL_UBATCH} for a long prompt, else {DECODE_UBATCH}",
    ]


def notes(results: Mapping[str, Sequence[Run]], last: DemoModel, backend: str, n_texts: int) -> list[str]:
    """What the table says and what it does not, and an answer of model `last` if it is one that speaks."""
    gpu = backend != "cpu"
    reference = f"`{ALL_ON_GPU}` or `stock {PREFILL_UBATCH}`" if gpu else f"stock {PREFILL_UBATCH}"
    lines = [
        f"Medians of {n_texts}; greedy answers of {ANSWER_TOKENS} tokens. Prefill is that of the long prompts "
        f"({LONG_TOKENS:,} tokens of a novel), decode that after the short ones (a few lines).",
        f"Identical: token for token what stock answers at the same split of the prompt: {reference} for long prompts, "
        f"stock {DECODE_UBATCH} for short and rolled back ones. At another split stock, too, rounds otherwise.",
    ]
    if gpu:
        lines.append(
            "Models this small show that the switch happens and keeps every token, not its gain: see `make bench`. "
            "Short prompts are not compared where experts are in host memory: stock computes some of them on the CPU."
        )
    else:
        lines.append(
            "No GPU took part: the CPU engine shows that the switch happens and keeps every token, not that it is "
            "faster. Its gain is on a GPU, whose memory both phases share: `make demo ENGINE=cuda` there."
        )
    if last.pretrained:
        answer = next(one for one in results[last.name][-1].answers if one.kind == "short")
        words = " ".join(answer.content.split())
        lines.append(f"{last.name} goes on: {PROMPT_TEXTS[SHORT_TEXTS[answer.text]]} >> {words} ...")
    return lines
