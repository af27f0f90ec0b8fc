"""What the demo runs: models, prompts, and the servers to compare. Decisions only, but for making the models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llama_phase.bench import Configuration
from llama_phase.demo_models import gemma_path
from llama_phase.engine_id import EngineInfo
from llama_phase.source import project_root

DECODE_UBATCH, PREFILL_UBATCH = 512, 2048
LONG_TOKENS, ANSWER_TOKENS, N_TEXTS = 3000, 48, 3
SHORT_TEXTS = ("lighthouse", "letter", "lecture", "recipe")  # names in PROMPT_TEXTS; the last one only warms up
ALL_ON_GPU = "stock, all on GPU"


@dataclass(frozen=True)
class DemoModel:
    """`slots`: experts per layer on the GPU, the rest being in host memory; 0 for a model without experts."""

    name: str
    about: str
    make: Callable[[Path], Path]  # into a folder, unless it is there
    pretrained: bool = False
    slots: int = 0
    expert_batch: int = 8


def _make_tiny(folder: Path) -> Path:
    tools = str(project_root() / "tools")
    if tools not in sys.path:
        sys.path.append(tools)
    from synth_gguf import make_model

    return make_model("tiny", folder / "tiny.gguf")


MODELS = {
    "tiny": DemoModel("tiny MoE", "synthetic qwen4exp, random weights", _make_tiny, slots=16, expert_batch=4),
    "gemma": DemoModel("Gemma 3 270M", "pretrained, no experts", gemma_path, pretrained=True),
}


def make_models() -> None:
    """All models of the demo, into models/; those that are there already stay."""
    for model in MODELS.values():
        print(model.make(project_root() / "models"))


@dataclass(frozen=True)
class DemoServer:
    """A server to run, and the micro-batch whose tokens it vouches for (0: none)."""

    configuration: Configuration
    reference_for: int = 0


def demo_servers(model: DemoModel, engine: EngineInfo, stock: EngineInfo | None, threads: int) -> list[DemoServer]:
    """Ours comes last. `stock` is the unpatched engine; without it, stock is ours with everything off.

    On a GPU the experts stay in host memory, and llama.cpp computes small batches of those on the CPU, which rounds
    otherwise than our slots. There the reference is one more server, with everything on the GPU, and prompts too short
    for a switch have none.
    """
    gpu = engine.backend == "cuda"
    host = gpu and model.slots > 0
    everywhere = ("-np", "1", "-t", str(threads), "--no-warmup", *(("-ngl", "99") if gpu else ()))
    placed = (*everywhere, "--cpu-moe") if host else everywhere
    sizes = {"host": "127.0.0.1", "port": 0, "ctx": 4096, "batch": PREFILL_UBATCH, "grace_s": 3}
    plain = {
        **sizes,
        "server_binary": (stock or engine).binary("llama-server"),
        "prefill_mode": "off",
        "expert_slots": 0,
        "fault": "",
    }
    ours = {
        **sizes,
        "server_binary": engine.binary("llama-server"),
        "prefill_mode": "transaction",
        "prefill_ubatch": PREFILL_UBATCH,
        "prefill_min_tokens": "auto",
        "ubatch": DECODE_UBATCH,
        "expert_slots": model.slots if host else 0,
        "expert_batch": model.expert_batch,
    }
    servers = [
        DemoServer(Configuration(f"stock {n}", {**plain, "ubatch": n}, placed), 0 if host else n)
        for n in (DECODE_UBATCH, PREFILL_UBATCH)
    ]
    if host:
        all_on_gpu = Configuration(ALL_ON_GPU, {**plain, "ubatch": PREFILL_UBATCH}, everywhere)
        servers.append(DemoServer(all_on_gpu, PREFILL_UBATCH))
    return [*servers, DemoServer(Configuration(f"phase {DECODE_UBATCH}/{PREFILL_UBATCH}", ours, placed))]
