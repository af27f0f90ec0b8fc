"""GGUF files of any size for tests: real headers, tensor data that is a hole in the file."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path

from fake_gguf import _string, _value

from llama_phase.gguf_header import tensor_bytes

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
Tensors = Mapping[str, tuple[tuple[int, ...], int]]


def write_sparse(path: Path, metadata: Mapping[str, object], tensors: Tensors) -> Path:
    """A GGUF of one file; takes a few blocks of the disk whatever its size."""
    head = [b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_string(key), value if isinstance(value, bytes) else _value(value)]
    end = 0
    for name, (dims, kind) in tensors.items():
        head.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, end))
        size = tensor_bytes(dims, kind)
        assert size or not prod(dims)
        end += -(-size // 32) * 32
    data = b"".join(head)
    data += bytes(-len(data) % 32)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + end)
    return path


@lru_cache(maxsize=1)
def _vocabulary() -> bytes:
    """250,000 tokens as a metadata value."""
    return struct.pack("<IIQ", 9, 8, 250_000) + b"".join(_string(f"token{i}") for i in range(250_000))


def write_flash_next(
    folder: Path,
    *,
    layers: int = 48,
    n_embd: int = 2560,
    n_expert: int = 512,
    n_ff: int = 640,
    mtp: int = 1,
    shards: int = 1,
    vocabulary: bool = False,
    ple_rows: int = 0,
    trunk: bool = True,
) -> Path:
    """The shape of a qwen4exp hybrid: three recurrent layers, then one of indexed attention; experts in Q4_0. Without
    `trunk` it is the MTP block alone, with embeddings and head."""
    a = "qwen4exp"
    total = layers + mtp
    attention = [index % 4 == 3 or index >= layers for index in range(total)]
    metadata: dict[str, object] = {
        "general.architecture": a,
        "general.name": "flash",
        f"{a}.block_count": total,
        f"{a}.nextn_predict_layers": mtp,
        f"{a}.context_length": 262144,
        f"{a}.embedding_length": n_embd,
        f"{a}.attention.head_count": 16,
        f"{a}.attention.head_count_kv": 2,
        f"{a}.attention.key_length": 256,
        f"{a}.attention.value_length": 256,
        f"{a}.attention.indexer.key_length": 128,
        f"{a}.attention.compress_ratios": [4 if is_attention else 0 for is_attention in attention],
        f"{a}.full_attention_interval": 4,
        f"{a}.rope.dimension_count": 64,
        f"{a}.expert_count": n_expert,
        f"{a}.expert_used_count": 10,
        f"{a}.ssm.conv_kernel": 4,
        f"{a}.ssm.state_size": 128,
        f"{a}.ssm.group_count": 16,
        f"{a}.ssm.inner_size": 4096,
    }
    if vocabulary:
        metadata["tokenizer.ggml.tokens"] = _vocabulary()
        metadata["tokenizer.ggml.merges"] = _vocabulary()
    tensors: dict[str, tuple[tuple[int, ...], int]] = {
        "token_embd.weight": ((n_embd, 4096), Q8_0),
        "output.weight": ((n_embd, 4096), Q8_0),
        "output_norm.weight": ((n_embd,), F32),
    }
    if ple_rows:
        tensors["per_layer_token_embd.weight"] = ((256, ple_rows), Q4_0)
    for index in range(0 if trunk else layers, total):
        b = f"blk.{index}."
        if attention[index]:
            for name, width in (("attn_q", 4096), ("attn_k", 512), ("attn_v", 512), ("indexer.k_proj", 128)):
                tensors[f"{b}{name}.weight"] = ((n_embd, width), F16)
        else:
            tensors[f"{b}attn_qkv.weight"] = ((n_embd, 8192), F16)
            tensors[f"{b}ssm_out.weight"] = ((4096, n_embd), F16)
        tensors[f"{b}ffn_gate_inp.weight"] = ((n_embd, n_expert), F32)
        tensors[f"{b}ffn_gate_exps.weight"] = ((n_embd, n_ff, n_expert), Q4_0)
        tensors[f"{b}ffn_up_exps.weight"] = ((n_embd, n_ff, n_expert), Q4_0)
        tensors[f"{b}ffn_down_exps.weight"] = ((n_ff, n_embd, n_expert), Q4_0)
    if shards == 1:
        return write_sparse(folder / ("flash.gguf" if trunk else "flash-mtp.gguf"), metadata, tensors)
    names = list(tensors)
    size = -(-len(names) // shards)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        keys = metadata if number == 0 else {"general.architecture": a}
        path = folder / f"flash-{number + 1:05}-of-{shards:05}.gguf"
        write_sparse(path, keys | {"split.count": shards, "split.no": number}, part)
    return folder / f"flash-00001-of-{shards:05}.gguf"
