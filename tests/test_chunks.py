"""A micro-batch whose experts and attention are computed in chunks: the same values in less memory.

Same split, bit for bit, but for two sequences at once, whose batches depend on when requests come.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_server import (
    DECODE_UBATCH,
    PREFILL_UBATCH,
    ROOT,
    EngineServer,
    Fleet,
    assert_same_but_for_ties,
    both,
    clean_environment,
)
from expert_servers import ExpertFleet

pytestmark = pytest.mark.engine

LENGTH = 7 * PREFILL_UBATCH // 2 + 3  # the last micro-batch is no multiple of a chunk


def prefill_buffer_bytes(server: EngineServer) -> int:
    """What leaving the prefill phase gave back: the compute buffers of its graph."""
    (step,) = [step for step in server.phase()["last_transaction"]["steps"] if "drop_prefill_buffers" in step["step"]]
    return -step["bytes"]


@pytest.mark.parametrize("model", ["qwen4exp", "qwen3moe", "qwen35moe"])
def test_same_values_in_less_memory(fleet: Fleet, prompt, model: str) -> None:
    """Chunks of 64, the tile of the kernels, and of 100, which is no multiple of it."""
    tokens = prompt(model, LENGTH)
    whole = fleet.phase(model)
    of_whole, of_stock = both(whole, fleet.stock(model), tokens, n=32)
    assert of_whole == of_stock
    for chunk in ("64", "100"):
        chunked = fleet.phase(model, CHUNK=chunk)
        assert chunked.complete(tokens, n=32) == of_stock, f"chunks of {chunk}"
        assert prefill_buffer_bytes(chunked) < 0.9 * prefill_buffer_bytes(whole)


@pytest.mark.parametrize("args", [("-fa", "off"), ("-ctk", "q8_0", "-ctv", "q8_0")], ids=["plain", "quantized"])
def test_other_attention(fleet: Fleet, prompt, args: tuple[str, ...]) -> None:
    """Without flash attention the experts alone are chunked."""
    model = "qwen4exp"
    chunked = fleet.phase(model, *args, CHUNK="100")
    of_chunks, of_stock = both(chunked, fleet.stock(model, *args), prompt(model, LENGTH), n=8)
    assert of_chunks == of_stock


@pytest.mark.parametrize("model", ["mixed-mtp", "fused"])
def test_through_the_ring(servers: ExpertFleet, prompt, model: str) -> None:
    """All chunks of a layer read one region of the ring, which is filled once a micro-batch, as without chunks."""
    tokens = prompt(model, LENGTH)
    expected = servers.stock_answer(model, tokens, 16, ubatch=PREFILL_UBATCH)
    streamed = []
    for chunk in ("0", "100"):
        server = servers.switching(model, 8, CHUNK=chunk, RING="2", RESTORE="prompt")
        before = server.phase()["experts"][0]["ring"]["layers_streamed"]
        assert server.complete(tokens, n=16) == expected, f"chunks of {chunk}"
        streamed.append(server.phase()["experts"][0]["ring"]["layers_streamed"] - before)
    assert streamed[0] == streamed[1] > 0


@pytest.mark.parametrize("kv", ["--kv-unified", "--no-kv-unified"])
def test_two_sequences_at_once(fleet: Fleet, prompt, kv: str) -> None:
    """Cells of the other sequence are masked; with a stream per sequence the masks stay whole."""
    model, sizes = "qwen4exp-exact", {"parallel": 2, "ctx": 8192}
    prompts = [prompt(model, LENGTH, seed) for seed in (1, 2)]
    server = fleet.phase(model, kv, sizes={"ubatch": DECODE_UBATCH, **sizes}, CHUNK="64")
    answers = server.complete_all(prompts, n=16)
    stock = fleet.stock(model, kv, **sizes)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_same_but_for_ties(answer.tokens, stock.complete(tokens, n=16))


def test_compute_buffers_of_a_large_micro_batch(engine: Path) -> None:
    """The shape of Qwen3.8-Flash-Next, 8192 tokens over 131072 cells: planned, nothing is allocated or computed."""
    command = [sys.executable, ROOT / "tools/compute_buffers.py", "--preset", "flash-next", "--chunk", "0,auto"]
    command += ["--ubatch", "8192", "--ctx", "131072"]
    planning = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert planning.returncode == 0, planning.stderr
    whole_mib, chunked_mib = (int(mib) for mib in re.findall(r"planned +(\d+) MiB", planning.stdout))
    assert chunked_mib <= 2560 < whole_mib, planning.stdout


def test_who_reads_a_mask_is_known() -> None:
    """A model file that takes the mask itself gets bits only if it writes them out: another release may add some."""
    source = (ROOT / "engine/phase-chunks.cpp").read_text()
    listed = {name.lower() for name in re.findall(r"arch == LLM_ARCH_(\w+)", source)}
    models = ROOT / "llama.cpp/src/models"
    readers = {path.stem.replace("-", "_") for path in models.glob("*.cpp") if "get_kq_mask()" in path.read_text()}
    assert readers == listed | {"qwen4exp"}
