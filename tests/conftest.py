"""Fixtures that need the built engine: models, server processes, prompts. They fail with the command to type."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from engine_server import DECODE_UBATCH, PHASE_BIN, ROOT, STOCK_BIN, EngineServer, Fleet, phase_environment, server_args
from expert_servers import ExpertFleet
from fake_world import World
from supervised import SMALL, Run

MODELS_DIR = ROOT / "models"
GEMMA = "gemma"

# a recurrent layer and one of indexed attention, for prompts of tens of thousands of tokens
THIN = {"layers": 2, "attn_every": 2, "n_embd": 64, "heads": 2, "heads_kv": 1, "head_dim": 32, "rope_dim": 16,
        "experts": 4, "experts_used": 1, "hc_rank": 8, "idx_heads": 1, "idx_dim": 32, "ple": False,
        "mtp": "no"}  # fmt: skip

# name -> preset and overrides. Split-dependent unless it ends in -exact (F32 throughout).
MODELS: dict[str, tuple[str, dict]] = {
    "qwen4exp": ("tiny", {}),
    "qwen3moe": ("tiny-moe", {}),
    "qwen35moe": ("tiny-35", {}),
    "qwen4exp-exact": ("tiny-exact", {}),
    "qwen3moe-exact": ("tiny-moe-exact", {}),
    "qwen35moe-exact": ("tiny-35-exact", {}),
    "qwen4exp-no-ple-exact": ("tiny-exact", {"ple": False}),
    "qwen4exp-thin": ("tiny", THIN),
    "qwen4exp-all-used": ("tiny", {"experts": 8, "experts_used": 8}),
    "qwen35moe-all-used": ("tiny-35", {"experts": 8, "experts_used": 8}),
}


def pytest_configure() -> None:
    """A shell that runs a script in the background ignores Ctrl-C, its children inherit that, and tests send it: here
    it has Python's handler, so what the tests start has the default.
    """
    sys.path.insert(0, str(ROOT / "tools"))
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def engine() -> Path:
    """Folder of the patched engine's programs."""
    if not (PHASE_BIN / "llama-server").exists():
        pytest.fail(f"no engine in {PHASE_BIN}: run make build", pytrace=False)
    return PHASE_BIN


@pytest.fixture(scope="session")
def stock_engine() -> Path:
    """Folder of the unpatched reference build's programs."""
    if not (STOCK_BIN / "llama-server").exists():
        pytest.fail(f"no reference build in {STOCK_BIN}: run make stock", pytrace=False)
    return STOCK_BIN


@pytest.fixture(scope="session")
def bindings(engine: Path) -> Path:
    """Folder of the libraries that llama_phase uses in a process."""
    if not list((ROOT / "llama_phase").glob("_engine.*.so")):
        pytest.fail("no bindings in llama_phase/: run make bindings", pytrace=False)
    from llama_phase import library_path

    return library_path()


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Path of a model by its name in MODELS, or of `gemma`; made once and kept in models/ for the next run."""

    def path_of(name: str) -> Path:
        if name == GEMMA:
            from llama_phase.demo_models import gemma_path

            return gemma_path(MODELS_DIR, show=lambda line: None)
        from synth_gguf import make_model

        preset, overrides = MODELS[name]
        return make_model(preset, MODELS_DIR / f"test-{name}.gguf", **overrides)

    return path_of


@pytest.fixture(scope="session", autouse=True)
def no_server_left_behind() -> Iterator[None]:
    """Fails the last test when a server that a test started is still there."""
    yield
    left = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "llama-server" in (command := " ".join(child.cmdline())):  # empty when it has ended
                left.append(command)
                child.kill()
    assert left == []


@pytest.fixture(scope="session")
def fleet(
    engine: Path, stock_engine: Path, model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    servers = Fleet(model_path, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def servers(
    engine: Path,
    stock_engine: Path,
    model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[ExpertFleet]:
    """Servers of one file of tests, with experts in host memory."""
    fleet = ExpertFleet(model_path, tmp_path_factory.mktemp(request.path.stem.removeprefix("test_")))
    yield fleet
    fleet.close()


@pytest.fixture
def one_server(fleet: Fleet) -> Iterator[Callable[..., EngineServer]]:
    """Starts phase servers of this test alone: `one_server(model, *args, sizes={}, FAULT=...)`."""
    started: list[EngineServer] = []

    def start(model: str, *args: str, sizes: dict[str, int] | None = None, **env: str) -> EngineServer:
        all_args = (*server_args(**({"ubatch": DECODE_UBATCH} | (sizes or {}))), *args)
        started.append(fleet.fresh(model, *all_args, env=phase_environment(**env)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def prompt(fleet: Fleet) -> Callable[..., Sequence[int]]:
    """`prompt(model, n, seed=1)`: n token ids, random ones, or prose for Gemma. Prompts of one seed share a prefix."""
    prose: dict[int, list[int]] = {}

    def make(model: str, n: int, seed: int = 1) -> Sequence[int]:
        if model != GEMMA:
            source = random.Random(seed)
            return [source.randrange(100, 4000) for _ in range(n)]
        if len(prose.get(seed, [])) < n:
            from llama_phase.prompt_texts import long_text

            prose[seed] = fleet.stock(GEMMA).tokenize(long_text(max(n, 2000), first_chapter=seed))
        return prose[seed][:n]

    return make


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def real(
    world: World, engine: Path, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Run]]:
    """Runs of the built engine with the smallest model."""
    monkeypatch.setenv("LLAMA_PHASE_SERVER_BINARY", str(engine / "llama-server"))
    world.model = model_path("qwen3moe")
    runs: list[Run] = []

    def start(*more: str, **options: object) -> Run:
        for old in runs:
            old.close()
        sizes = {"ctx": 2048, "ubatch": 126, "prefill_ubatch": 512, "batch": 512}
        runs.append(Run(world, upstream=(*SMALL, *more), **sizes | options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
