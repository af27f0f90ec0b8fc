"""The demo: verdicts and table from made-up results, which servers it compares, how it ends; and one real run."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from llama_phase import demo
from llama_phase.demo_plan import ALL_ON_GPU, MODELS, DemoModel, demo_servers
from llama_phase.demo_results import Answer, Run, compare, failures, make_table, notes, opening, rows
from llama_phase.engine_id import EngineInfo
from llama_phase.errors import LlamaPhaseError, MissingPrerequisite, UsageError
from llama_phase.settings import Settings

TOKENS = {("short", 512): (1, 2), ("long", 512): (3, 4), ("short", 2048): (5, 6), ("long", 2048): (7, 8)}


def answers(short_ubatch: int, long_ubatch: int, n_texts: int = 2) -> list[Answer]:
    """Each micro-batch has tokens of its own, so a comparison with the wrong one shows."""
    return [
        Answer(kind, text, ubatch, 0.5 + text, 1000.0 + text, 50.0 + text, (text, *TOKENS[kind, ubatch]), "words")
        for text in range(n_texts)
        for kind, ubatch in (("short", short_ubatch), ("long", long_ubatch))
    ]


def counters(entered: int, left: int, rolled_back: int) -> dict[str, int]:
    return {"entered": entered, "left": left, "rolled_back": rolled_back}


def three_runs() -> list[Run]:
    return [
        Run("stock 512", answers(512, 512), reference_for=512),
        Run("stock 2048", answers(2048, 2048), reference_for=2048),
        Run("phase 512/2048", answers(512, 2048), counters(2, 2, 0)),
    ]


def printed(shown: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(shown)
    return console.file.getvalue()


def test_each_answer_is_compared_at_the_split_it_ran_at() -> None:
    runs = three_runs()
    compare(runs)
    assert [run.compared for run in runs] == [0, 0, 4]
    assert failures({"m": runs}) == []
    assert rows(runs)[2][-2:] == ["2 / 2 / 0", "yes, 4/4"]


def test_a_rolled_back_prompt_is_compared_at_the_small_ubatch() -> None:
    runs = three_runs()
    runs[2] = Run("phase", answers(512, 512), counters(0, 0, 2))
    compare(runs)
    assert runs[2].compared == 4 and not runs[2].differing
    assert rows(runs)[2][-2] == "0 / 0 / 2"


def test_no_transaction_at_all_is_a_failure() -> None:
    runs = three_runs()
    runs[2] = Run("phase", answers(512, 512), counters(0, 0, 0))
    compare(runs)
    assert failures({"m": runs}) == ["m, phase: no long prompt entered the prefill phase"]


@pytest.mark.parametrize("tokens", [(0, 7, 9), (0, 7), ()])
def test_one_differing_answer_is_named(tokens: tuple[int, ...]) -> None:
    runs = three_runs()
    runs[2].answers[1] = dataclasses.replace(runs[2].answers[1], tokens=tokens)
    compare(runs)
    (line,) = failures({"m": runs})
    assert line.startswith("m, phase 512/2048: ") and line.endswith(": long prompt 1 at micro-batch 2048")
    assert rows(runs)[2][-1] == "NO, 3/4"


def test_two_empty_answers_are_no_proof() -> None:
    runs = [
        Run("stock", [dataclasses.replace(one, tokens=()) for one in answers(512, 512)], reference_for=512),
        Run("phase", [dataclasses.replace(one, tokens=()) for one in answers(512, 512)], counters(0, 0, 0)),
    ]
    compare(runs)
    assert len(runs[1].differing) == 4


def test_without_a_reference_nothing_is_claimed() -> None:
    runs = [Run("stock", answers(512, 512)), Run("phase", answers(512, 2048), counters(2, 2, 0))]
    compare(runs)
    assert rows(runs)[1][-1] == "?"


def test_rows_hold_medians_of_the_right_prompts() -> None:
    runs = [Run("stock 512", answers(512, 512, n_texts=3), reference_for=512)]
    assert rows(runs) == [["stock 512", "1,001", "1.50", "1.50", "51.0"]]
    slow = [dataclasses.replace(one, prompt_per_second=1.0) for one in runs[0].answers if one.kind == "short"]
    runs[0].answers[::2] = slow
    assert rows(runs)[0][1] == "1,001"


def test_table_fits_80_columns_and_cuts_nothing() -> None:
    results = {model.name: three_runs() for model in MODELS.values()}
    for runs in results.values():
        compare(runs)
    text = printed(make_table(results))
    assert "…" not in text
    for words in (*results, "stock 2048", "phase 512/2048", "2 / 2 / 0", "yes, 4/4"):
        assert text.count(words) >= 1, words


def an_engine(backend: str, stock: bool = False) -> EngineInfo:
    folder = f"/engines/{'stock-' if stock else ''}{backend}"
    values = dict.fromkeys(EngineInfo.__dataclass_fields__, "") | {"backend": backend, "folder": folder, "id": "id"}
    return EngineInfo(**values)


def load(server) -> Settings:
    configuration = server.configuration
    return Settings.load(model="m.gguf", upstream=configuration.upstream, **configuration.settings)


@pytest.mark.parametrize("unpatched", [True, False])
def test_servers_on_a_cpu(unpatched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's own settings are: two stock servers without a trace of phases, and ours."""
    for name, value in {"HOST": "0.0.0.0", "BATCH": "64", "CTX": "99", "EXPERT_SLOTS": "8", "FAULT": "enter.x"}.items():
        monkeypatch.setenv(f"LLAMA_PHASE_{name}", value)
    servers = demo_servers(MODELS["tiny"], an_engine("cpu"), an_engine("cpu", stock=True) if unpatched else None, 2)
    loaded = [load(server) for server in servers]
    assert [server.reference_for for server in servers] == [512, 2048, 0]
    assert [one.ubatch for one in loaded] == [512, 2048, 512]
    assert [one.prefill_mode for one in loaded] == ["off", "off", "transaction"]
    assert all(one.host == "127.0.0.1" and one.port == 0 and one.batch == 2048 for one in loaded)
    stock = "stock-cpu" if unpatched else "cpu"
    assert [one.server_binary.parts[2] for one in loaded] == [stock, stock, "cpu"]
    from llama_phase.env import engine_variables

    assert all(engine_variables(one, {}) == {} for one in loaded[:2])


def test_servers_on_a_gpu() -> None:
    """Host experts for all but the reference, which has everything on the GPU; dense models need no such."""
    moe = demo_servers(MODELS["tiny"], an_engine("cuda"), None, 2)
    assert [(s.configuration.name, s.reference_for) for s in moe][2] == (ALL_ON_GPU, 2048)
    assert ["--cpu-moe" in s.configuration.upstream for s in moe] == [True, True, False, True]
    assert [s.reference_for for s in moe] == [0, 0, 2048, 0]
    assert load(moe[3]).expert_slots >= 4 * load(moe[3]).expert_batch
    dense = demo_servers(MODELS["gemma"], an_engine("cuda"), None, 2)
    assert [s.reference_for for s in dense] == [512, 2048, 0]
    assert not any("--cpu-moe" in s.configuration.upstream for s in dense)
    assert all("-ngl" in s.configuration.upstream for s in (*moe, *dense))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_words_say_what_is_not_shown(backend: str) -> None:
    said = " ".join(notes({MODELS["gemma"].name: three_runs()}, MODELS["gemma"], backend, 2))
    assert ("No GPU took part" in said) == (backend == "cpu")
    assert "same split" in said and "words" in said
    assert "make stock" in " ".join(opening([MODELS["tiny"]], an_engine("cpu"), None, 2))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """pretend(runs): `run` measures these instead of servers; pretend(None, error): each server raises it."""

    def install(runs: list[Run] | None, error: BaseException | None = None) -> None:
        left = iter(runs or ())

        def measure(*_: object) -> Run:
            if error is not None:
                raise error
            return next(left)

        monkeypatch.setattr(demo, "measure", measure)
        monkeypatch.setattr(demo, "engine_info", lambda backend, stock=False: an_engine("cpu", stock))
        monkeypatch.setattr(demo, "project_root", lambda: tmp_path)
        monkeypatch.setattr(demo, "MODELS", {"m": DemoModel("m", "none", lambda folder: folder / "m.gguf")})

    return install


def run_demo() -> str:
    console = Console(file=io.StringIO(), width=80)
    demo.run(["m"], console=console)
    return console.file.getvalue()


def test_same_tokens_end_well(pretend) -> None:
    pretend(three_runs())
    assert "yes, 4/4" in run_demo()


def test_differing_tokens_exit_with_1(pretend) -> None:
    runs = three_runs()
    runs[2].answers[0] = dataclasses.replace(runs[2].answers[0], tokens=(9,))
    pretend(runs)
    with pytest.raises(LlamaPhaseError, match="short prompt 1 at micro-batch 512") as caught:
        run_demo()
    assert caught.value.exit_code == 1 and caught.value.fix


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        demo.run(["tinny"])
    assert "tiny" in caught.value.fix


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MissingPrerequisite("x", fix="y")])
def test_what_ends_a_server_ends_the_demo(pretend, error: BaseException) -> None:
    pretend(None, error)
    with pytest.raises(type(error)):
        run_demo()


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_signals_unwind_and_are_given_back(number: int, raised: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(raised) as caught, demo._unwound_by_signals():
        os.kill(os.getpid(), number)
    assert raised is KeyboardInterrupt or caught.value.code == 128 + number
    assert signal.getsignal(number) is before


def servers_running() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if "llama-server" in child.name()}


@pytest.mark.engine
@pytest.mark.slow
def test_real_run_on_the_tiny_model(engine: Path, stock_engine: Path, monkeypatch, tmp_path: Path) -> None:
    """Same split: phase against stock at the micro-batch that each prompt ran at. Nothing is left running."""
    monkeypatch.setenv("LLAMA_PHASE_STATE_DIR", str(tmp_path))
    before = servers_running()  # those of other tests
    console = Console(file=io.StringIO(), width=80)
    demo.run(["tiny"], quick=True, console=console)
    said = console.file.getvalue()
    assert "yes, 2/2" in said and "1 / 1 / 0" in said
    assert not servers_running() - before
    assert not list((tmp_path / "running").glob("*"))
