"""The first two minutes: real text through stock llama.cpp and through the switch, side by side.

For each model three servers run one after the other: stock at the decode micro-batch, stock at the prefill
micro-batch, and ours, which goes from the one to the other for a long prompt and back for its answer. Ours has to give
the tokens of the stock server that cuts the prompt as ours did; which one that is, its counters say.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from llama_phase.client import RequestFailed
from llama_phase.demo_plan import (
    ANSWER_TOKENS,
    LONG_TOKENS,
    MODELS,
    N_TEXTS,
    PREFILL_UBATCH,
    SHORT_TEXTS,
    DemoModel,
    DemoServer,
    demo_servers,
)
from llama_phase.demo_results import COUNTERS, Answer, Run, compare, failures, make_table, notes, opening
from llama_phase.engine_id import EngineInfo, engine_info
from llama_phase.errors import BuildError, LlamaPhaseError, UsageError
from llama_phase.prompt_texts import PROMPT_TEXTS, long_text
from llama_phase.server import Server
from llama_phase.settings import Settings
from llama_phase.source import project_root

SHORT_TOKENS, START_TOKENS = 60, 500  # what a short prompt and the start of a server count in the progress bar
BUSY_PERCENT = 40.0

Step = Callable[[str, int], None]  # what begins ("": nothing new), and how much was done
Begin = Callable[[str, int], AbstractContextManager[Step]]  # a part of the work by its name, and how much it is


def run(models: Sequence[str] = tuple(MODELS), *, quick: bool = False, console: Console | None = None) -> None:
    """Run the demo and print its table. `models`: names in MODELS; `quick`: one text of a kind, no warm-up,
    and one thread, which does not wait for others on a busy machine.

    Raises LlamaPhaseError (exit code 1) when tokens differ or no prompt switched, and what engine_info, the models and
    Server raise. Whatever ends it, SIGTERM and SIGHUP included, no server is left running and no half file.
    """
    console = console or Console()
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise UsageError(f"there is no demo model {unknown[0]!r}", fix=f"one of {', '.join(MODELS)}")
    with _unwound_by_signals():
        try:
            results = _measure_all([MODELS[name] for name in models], quick, console)
        except (KeyboardInterrupt, SystemExit):
            console.print("interrupted: nothing is left running; the same command starts again")
            raise
    differing = failures(results)
    if differing:
        raise LlamaPhaseError(
            "the demo did not show what it should:\n  " + "\n  ".join(differing),
            fix="please report it, with the output of `llama-phase version`",
        )


def _measure_all(models: Sequence[DemoModel], quick: bool, console: Console) -> dict[str, list[Run]]:
    def say(line: str, wrap: bool = False) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=not (wrap and console.is_terminal))

    engine = engine_info("auto")
    stock = _stock_of(engine)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if quick else threads
    for line in opening(models, engine, stock, threads):
        say(line)
    busy = psutil.cpu_percent(0.3)
    if busy > BUSY_PERCENT:
        say(f"other programs keep the machine {busy:.0f} % busy: the speeds will say little")

    n_texts = 1 if quick else N_TEXTS
    results: dict[str, list[Run]] = {}
    with _progress(console) as begin:
        with begin("models", len(models)) as step:
            paths = []
            for model in models:
                step(f"making {model.name}", 0)
                paths.append(model.make(project_root() / "models"))
                step("", 1)
        for model, path in zip(models, paths, strict=True):
            servers = demo_servers(model, engine, stock, threads)
            pair = SHORT_TOKENS + LONG_TOKENS + 2 * ANSWER_TOKENS
            with begin(model.name, len(servers) * (START_TOKENS + (n_texts + (not quick)) * pair)) as step:
                results[model.name] = [measure(server, path, n_texts, not quick, step) for server in servers]
            compare(results[model.name])
    console.print(make_table(results))
    for line in notes(results, models[-1], engine.backend, n_texts):
        say(line, wrap=True)
    return results


def _stock_of(engine: EngineInfo) -> EngineInfo | None:
    """The unpatched build of the same upstream release, if there is one."""
    with suppress(BuildError):
        stock = engine_info(engine.backend, stock=True)
        return stock if stock.tag == engine.tag else None
    return None


def measure(demo_server: DemoServer, model: Path, n_texts: int, warm_up: bool, step: Step) -> Run:
    """Start a server, ask it `n_texts` short and long texts, stop it. Raises what Server and Client raise."""
    configuration = demo_server.configuration
    settings = Settings.load(model=model, upstream=configuration.upstream, **configuration.settings)
    step(f"{configuration.name}: loading", 0)
    with Server(settings) as server:
        step("", START_TOKENS)

        def ask_both(text: int, label: str) -> list[Answer]:
            words = {"short": PROMPT_TEXTS[SHORT_TEXTS[text]], "long": long_text(LONG_TOKENS, first_chapter=text + 1)}
            answers = []
            for kind, prompt in words.items():
                step(f"{configuration.name}: {kind} prompt, {label}", 0)
                answers.append(ask(server, kind, text, prompt, step))
            return answers

        try:
            if warm_up:
                ask_both(len(SHORT_TEXTS) - 1, "warm-up")
            before = _counters(server)
            answers = [answer for text in range(n_texts) for answer in ask_both(text, f"{text + 1} of {n_texts}")]
            after = _counters(server)
        except RequestFailed:
            server.check_alive()  # its death says more than the broken connection
            raise
    moved = None if before is None or after is None else {name: after[name] - before[name] for name in COUNTERS}
    return Run(configuration.name, answers, moved, demo_server.reference_for)


def ask(server: Server, kind: str, text: int, words: str, step: Step) -> Answer:
    """One greedy answer to `words`, of which LONG_TOKENS tokens are kept."""
    with server.client() as client:
        prompt = client.tokenize(words)[:LONG_TOKENS]
    before = _counters(server)
    tokens: list[int] = []
    first_token_s, content, timings, done = 0.0, "", {}, 0
    # a client of its own: llama-server closes the connection after a streamed answer, without saying so
    with server.client() as client:
        begin_s = time.perf_counter()
        for chunk in client.stream(prompt, ANSWER_TOKENS, cache_prompt=False, ignore_eos=True, return_progress=True):
            timings = chunk.timings
            progress = chunk.raw.get("prompt_progress")
            if progress is None:
                if chunk.tokens and not tokens:
                    first_token_s = time.perf_counter() - begin_s
                tokens += chunk.tokens
                content += chunk.text
            now = len(prompt) + len(tokens) if progress is None else progress["processed"]
            step("", now - done)
            done = now
    after = _counters(server)
    switched = before is not None and after is not None and after["entered"] > before["entered"]
    return Answer(
        kind,
        text,
        PREFILL_UBATCH if switched else server.settings.ubatch,
        first_token_s,
        timings["prompt_per_second"],
        timings["predicted_per_second"],
        tuple(tokens),
        content,
    )


def _counters(server: Server) -> dict[str, int] | None:
    """None from an engine without phases, or with phases off."""
    with server.client() as client:
        phase: dict[str, Any] = client.phase() or {}
    counters = phase.get("counters")
    return None if counters is None else {name: counters[name] for name in COUNTERS}


@contextmanager
def _progress(console: Console) -> Iterator[Begin]:
    """A bar with ETA on a terminal, elsewhere a line for each server."""
    bar = Progress(
        BarColumn(16),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=3600,  # all of a task, since its parts differ in speed
    )

    @contextmanager
    def begin(title: str, total: int) -> Iterator[Step]:
        task = bar.add_task(title, total=total)
        said = ""

        def step(what: str, amount: int) -> None:
            nonlocal said
            bar.update(task, advance=amount, description=f"{title}: {what}" if what else None)
            part = what.partition(":")[0]
            if part not in ("", said) and not console.is_terminal:
                said = part
                console.print(f"{title}: {part}", highlight=False, markup=False, soft_wrap=True)

        yield step
        bar.remove_task(task)

    with bar:
        yield begin


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, which also works where a script started us with SIGINT ignored."""

    def unwind(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    numbers = [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [signal.SIGHUP])
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
