"""Small GGUF files for tests: valid headers, zeros as tensor data."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

TRUNK = ("token_embd.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight")


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    assert isinstance(value, list)
    items = [_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object] | None = None,
    tensors: Sequence[str] = TRUNK,
    *,
    architecture: str = "qwen3moe",
) -> Path:
    """A GGUF whose tensors are 8 x 4 F32 each. `metadata` keys starting with a dot get the architecture in front."""
    pairs: dict[str, object] = {"general.architecture": architecture, f"{architecture}.block_count": 2}
    for key, value in (metadata or {}).items():
        pairs[architecture + key if key.startswith(".") else key] = value
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs.items():
        head += _string(key) + _value(value)
    for index, name in enumerate(tensors):
        head += _string(name) + struct.pack("<IQQIQ", 2, 8, 4, 0, index * 128)
    head += bytes(-len(head) % 32)
    path.write_bytes(head + bytes(128 * len(tensors)))
    return path
