"""Facts about a model: every byte is counted once, in the place where the engine puts it."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sparse_gguf import F16, F32, Q4_0, Q8_0, write_flash_next, write_sparse

from llama_phase.errors import LlamaPhaseError, ModelError
from llama_phase.gguf_facts import ModelFacts, read_facts
from llama_phase.gguf_header import tensor_bytes
from llama_phase.hardware import Gpu, Machine
from llama_phase.plan import make_plan
from llama_phase.plan_choices import Choices
from llama_phase.plan_report import Report
from llama_phase.plan_text import lines
from llama_phase.settings import Settings


def all_bytes(facts: ModelFacts) -> int:
    layers = sum(layer.dense_bytes + layer.host_extra_bytes + layer.experts_bytes for layer in facts.layers)
    return layers + facts.input_bytes + facts.output_bytes


def small(folder: Path, metadata: dict[str, object], tensors: dict) -> ModelFacts:
    base = {
        "general.architecture": "test",
        "test.block_count": 1,
        "test.embedding_length": 64,
        "test.attention.head_count": 4,
        "test.attention.head_count_kv": 2,
    }
    return read_facts(write_sparse(folder / "m.gguf", base | metadata, tensors))


def test_header_of_a_100_gb_model_is_read_in_a_second(tmp_path: Path) -> None:
    path = write_flash_next(tmp_path, vocabulary=True, ple_rows=200_000_000)
    assert path.stat().st_size > 95e9 and path.stat().st_blocks * 512 < 100e6
    started = time.process_time()
    facts = read_facts(path)
    assert time.process_time() - started < 1.0
    assert facts.experts_bytes == 48 * 512 * 3 * 2560 * 640 // 32 * 18
    assert facts.input_bytes > 28e9


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_byte_is_counted_once_over_all_shards(tmp_path: Path, shards: int) -> None:
    facts = read_facts(write_flash_next(tmp_path, layers=8, n_expert=32, shards=shards))
    assert facts.n_shards == shards
    headers_bytes = facts.file_bytes - all_bytes(facts)
    assert 0 < headers_bytes < 20_000
    whole = replace(facts, path=Path(), n_shards=1, file_bytes=0)
    (tmp_path / "one").mkdir()
    one = read_facts(write_flash_next(tmp_path / "one", layers=8, n_expert=32))
    assert whole == replace(one, path=Path(), file_bytes=0)


def test_layers_of_a_hybrid(tmp_path: Path) -> None:
    facts = read_facts(write_flash_next(tmp_path, layers=8, n_expert=32))
    assert [layer.kind for layer in facts.layers] == ["recurrent"] * 3 + ["attention"] + ["recurrent"] * 3 + [
        "attention"
    ] + ["attention"]
    assert [layer.mtp for layer in facts.layers] == [False] * 8 + [True] and len(facts.moe_layers) == 8
    recurrent, attention = facts.layers[0], facts.layers[3]
    assert (attention.kv_k, attention.kv_v, attention.state_bytes) == (512, 512, 0)
    assert attention.indexer_k == 256, "key and pooled key"
    assert (recurrent.kv_k, recurrent.kv_v, recurrent.indexer_k) == (0, 0, 0)
    assert recurrent.state_bytes == 4 * (3 * (4096 + 2 * 16 * 128) + 4096 * 128)
    assert attention.expert_bytes == 3 * 2560 * 640 // 32 * 18 and facts.n_used == 10 and facts.has_indexer


def test_tables_stay_in_host_memory_and_a_tied_one_is_on_the_device_too(tmp_path: Path) -> None:
    table = tensor_bytes((64, 1000), Q8_0)
    tensors = {"token_embd.weight": ((64, 1000), Q8_0), "blk.0.attn_k.weight": ((64, 32), F16)}
    tied = small(tmp_path, {}, tensors)
    assert (tied.input_bytes, tied.output_bytes) == (table, table)
    own = small(tmp_path, {}, tensors | {"output.weight": ((64, 1000), F32)})
    assert (own.input_bytes, own.output_bytes) == (table, 4 * 64000)


def test_what_cpu_moe_moves_but_slots_do_not_hold(tmp_path: Path) -> None:
    names = {
        "ffn_gate_up_exps.weight": ((64, 64, 8), Q4_0),
        "ffn_down_exps.weight": ((32, 64, 8), Q4_0),
        "ffn_down_exps.bias": ((64, 8), F32),
        "ffn_gate_shexp.weight": ((64, 64), F16),
        "ffn_gate_inp.weight": ((64, 8), F32),
    }
    layer = small(tmp_path, {}, {f"blk.0.{name}": value for name, value in names.items()}).layers[0]
    assert layer.expert_tensor_bytes == (8 * 64 * 64 // 32 * 18, 8 * 32 * 64 // 32 * 18) and layer.n_expert == 8
    assert layer.host_extra_bytes == 64 * 8 * 4
    assert layer.dense_bytes == 64 * 64 * 2 + 64 * 8 * 4


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"test.attention.indexer.key_length": 64}, "kv"),
        ({"test.attention.head_count": 0, "test.attention.head_count_kv": 0}, "kv"),
        ({"test.attention.sliding_window": 512}, "sliding window"),
    ],
)
def test_what_the_header_cannot_tell_is_said_to_be_unknown(tmp_path: Path, metadata: dict, word: str) -> None:
    facts = small(tmp_path, metadata, {"blk.0.attn_k.weight": ((64, 32), F16)})
    assert word in facts.unknown
    assert (facts.layers[0].kv_k is None) == (word == "kv")


def test_kv_of_other_attentions(tmp_path: Path) -> None:
    mla = {"test.attention.head_count_kv": 1, "test.attention.key_length": 576, "test.attention.key_length_mla": 192}
    layer = small(tmp_path, mla, {"blk.0.attn_kv_a_mqa.weight": ((64, 32), F16)}).layers[0]
    assert (layer.kv_k, layer.kv_v) == (576, 0)
    per_layer = {"test.attention.head_count_kv": [3], "test.attention.value_length": 8}
    layer = small(tmp_path, per_layer, {"blk.0.attn_k.weight": ((64, 32), F16)}).layers[0]
    assert (layer.kv_k, layer.kv_v) == (16 * 3, 8 * 3)
    layer = small(tmp_path, {}, {"blk.0.ssm_a": ((4,), F32)}).layers[0]
    assert layer.kind == "recurrent" and layer.state_bytes is None


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    path = write_flash_next(tmp_path, layers=4, n_expert=8, shards=3)
    (tmp_path / "flash-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="flash-00002-of-00003"):
        read_facts(path)


@pytest.mark.parametrize("value", [0, -1, 1, 2**31, 2**63])
@pytest.mark.parametrize(
    "key",
    ["context_length", "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
     "attention.indexer.key_length", "expert_count", "expert_used_count", "nextn_predict_layers"],
)  # fmt: skip
def test_no_number_of_a_header_ends_a_plan_in_a_traceback(tmp_path: Path, key: str, value: int) -> None:
    number = struct.pack("<IQ", 10, value) if value >= 0 else struct.pack("<Iq", 11, value)
    names = ("token_embd.weight", "blk.0.attn_k.weight", "blk.0.ffn_up_exps.weight")
    tensors = {name: ((64, 32), F32) for name in names} | {"blk.0.ffn_down_exps.weight": ((), F32)}
    metadata = {"test.context_length": 4096, "test.expert_count": 32, f"test.{key}": number}
    try:
        facts = small(tmp_path, metadata, tensors)
        choices = Choices.of(Settings.load(model=tmp_path / "m.gguf"), facts)
    except LlamaPhaseError as error:  # no context, or an MTP block alone
        assert error.fix
        return
    machine = Machine(gpus=(Gpu(0, "", vram_free_bytes=8 << 30),))
    assert lines(Report(facts, machine, make_plan(facts, machine, choices)))
