"""Servers and models for the tests of experts in host memory: slots in the decode phase, a ring in the prefill phase.

Servers run with --no-repack: the experts keep the file's layout, and stock then computes them with the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_server import DECODE_UBATCH, PHASE_BIN, PREFILL_UBATCH, Answer, EngineServer, Fleet, server_args

N_EXPERT, N_USED, N_LAYER = 32, 4, 8  # of the tiny presets
EXPERT_BYTES = 3 * 256 * 128 // 32 * 18  # of one expert: gate, up and down in Q4_0
LAYER_BYTES = N_EXPERT * EXPERT_BYTES
RAW = ("--no-repack",)

# name -> preset, overrides that may break the generator's own rules
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("tiny-moe", {"expert_type": "Q4_0,Q8_0,Q4_K,F16,F32"}),
    "mixed-mtp": ("tiny", {"expert_type": "Q8_0,F16,Q4_0"}),
    "q8_0": ("tiny-moe", {"expert_type": "Q8_0"}),
    "q4_k": ("tiny-moe", {"expert_type": "Q4_K"}),
    "f16": ("tiny-moe", {"expert_type": "F16"}),
    # experts of 3366, 1782 and 6534 bytes (gate and up): no multiples of 16
    "odd-q8_0": ("tiny-moe", {"expert_type": "Q8_0", "n_embd": 96, "n_ff_exp": 33}),
    "odd-q4_0": ("tiny-moe", {"expert_type": "Q4_0", "n_embd": 96, "n_ff_exp": 33}),
    "odd-f16": ("tiny-moe", {"expert_type": "F16", "n_embd": 99, "n_ff_exp": 33}),
    "fused": ("tiny-35", {"mtp": "no"}),
    "biased": ("tiny-moe", {"arch": "gpt-oss"}),
    "scaled": ("tiny-moe", {}),
    "scaled-hybrid": ("tiny", {"mtp": "no"}),
    "flat": ("tiny", {"bigram": 0.0}),  # no token has probability 1
    "one-used": ("tiny-moe", {"experts_used": 1}),
    "one-expert": ("tiny-moe", {"experts": 1, "experts_used": 1}),
    "all-used": ("tiny-moe", {"experts": 5, "experts_used": 5}),
    "many": ("tiny", {"experts": 64, "mtp": "no"}),
    "many-35": ("tiny-35", {"experts": 64, "mtp": "no"}),
}


def make_variant(name: str, path: Path) -> Path:
    """The model of VARIANTS at `path`; `fused`: gate and up in one tensor; `scaled`: a scale for each expert."""
    from synth.checked_spec import make_spec
    from synth.gguf_file import llama_cpp_dir, use_gguf_py
    from synth_gguf import plan_tensors

    preset, overrides = VARIANTS[name]
    spec = replace(make_spec(preset), **overrides)
    source = llama_cpp_dir(None)
    use_gguf_py(source)
    from synth.writer import write_model

    plan, vocabulary = plan_tensors(spec, source)
    if name == "fused":
        plan.tensors = fused(plan.tensors)
    if name.startswith("scaled"):
        for tensor in [tensor for tensor in plan.tensors if tensor.name.endswith("_exps.weight")]:
            scale = tensor.name.replace("weight", "scale")
            plan.values(scale, spec.experts, lambda rng: rng.uniform(0.5, 1.5, spec.experts))
    write_model(plan, vocabulary, path)
    return path


def fused(tensors: list) -> list:
    """Each layer's gate and up as one tensor: of every expert the gate's rows, then the up's."""
    import numpy as np

    by_name = {tensor.name: tensor for tensor in tensors}

    def both(gate: Any, up: Any) -> Callable[[], Any]:
        def chunks() -> Any:
            parts = [np.concatenate([c.view(np.uint8).ravel() for c in t.chunks()]) for t in (gate, up)]
            n_expert = gate.shape[2]
            yield np.concatenate([part.reshape(n_expert, -1) for part in parts], axis=1)

        return chunks

    out = []
    for tensor in tensors:
        if "ffn_gate_exps" in tensor.name:
            up = by_name[tensor.name.replace("gate", "up")]
            rows, columns, n_expert = tensor.shape
            name = tensor.name.replace("gate", "gate_up")
            out.append(replace(tensor, name=name, shape=(rows, 2 * columns, n_expert), chunks=both(tensor, up)))
        elif "ffn_up_exps" not in tensor.name:
            out.append(tensor)
    return out


class ExpertFleet(Fleet):
    """Adds servers with slots, and remembers what stock answers."""

    def __init__(self, models: Callable[[str], Path], folder: Path):
        super().__init__(self._path_of, folder)
        self.others = models
        self.answers: dict[tuple, Answer] = {}

    def _path_of(self, name: str) -> Path:
        if name not in VARIANTS:
            return self.others(name)
        path = self.logs / f"{name}.gguf"
        return path if path.exists() else make_variant(name, path)

    def slots(self, model: str, n: int | str, *args: str, **more: Any) -> EngineServer:
        """Slots alone; `more` as for environment(), `sizes` for server_args."""
        sizes = {"ubatch": DECODE_UBATCH} | more.pop("sizes", {})
        return self._get(PHASE_BIN, model, (*server_args(**sizes), *RAW, *args), environment(n, **more))

    def switching(self, model: str, n: int | str, *args: str, **more: Any) -> EngineServer:
        """Slots and transactions."""
        return self.slots(model, n, *args, **TRANSACTION, **more)

    def alone(self, model: str, n: int | str, *args: str, raw: bool = True, **more: Any) -> EngineServer:
        """As slots(), of one test alone, which stops it."""
        sizes = {"ubatch": DECODE_UBATCH} | more.pop("sizes", {})
        return self.fresh(model, *server_args(**sizes), *(RAW if raw else ()), *args, env=environment(n, **more))

    def stock_answer(
        self, model: str, tokens: Sequence[int], n: int, *args: str, ubatch: int = DECODE_UBATCH, **sizes: int
    ) -> Answer:
        key = (model, tuple(tokens), n, args, ubatch, tuple(sizes.items()))
        if key not in self.answers:
            self.answers[key] = self.stock(model, *RAW, *args, ubatch=ubatch, **sizes).complete(tokens, n=n)
        return self.answers[key]


TRANSACTION = {"PREFILL_MODE": "transaction", "PREFILL_UBATCH": PREFILL_UBATCH}


def environment(n_slots: int | str, **more: Any) -> dict[str, str]:
    """`more` holds names without the prefix; EXPERT_BATCH is 1 unless given."""
    values = {"EXPERT_SLOTS": n_slots, "EXPERT_BATCH": 1} | more
    return {f"LLAMA_PHASE_{name}": str(value) for name, value in values.items()}


def experts(server: EngineServer, member: int = 0) -> dict[str, Any]:
    """The figures of the target (0) or of the draft (1)."""
    return server.phase()["experts"][member]


def missed(server: EngineServer, member: int = 0) -> int:
    return experts(server, member)["slots"]["missed"]


@contextmanager
def stopped_at_the_end(fleet: ExpertFleet) -> Iterator[Callable[..., EngineServer]]:
    """`fleet.alone`, whose servers are stopped when the block ends, also by an exception."""
    started: list[EngineServer] = []

    def start(*args: Any, **more: Any) -> EngineServer:
        started.append(fleet.alone(*args, **more))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()


@contextmanager
def switching_until_the_end(fleet: ExpertFleet, n_slots: int) -> Iterator[Callable[..., EngineServer]]:
    """`start(model, *args, **settings)`: servers with so many slots and transactions, stopped when the block ends."""
    with stopped_at_the_end(fleet) as start:
        yield lambda model, *args, **more: start(model, n_slots, *args, **(TRANSACTION | more))
