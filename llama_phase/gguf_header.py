"""What a GGUF file says about itself, read in milliseconds, and the checks that spare a long load that must fail.

Layout (little-endian), all of it before the tensor data:

    magic "GGUF" | u32 version | u64 n_tensors | u64 n_kv | n_kv x (key, u32 type, value)
    n_tensors x (name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset) | padding | data

``read_header`` parses one file, ``check_model`` looks at the whole model: shards, sizes, and contents that make
llama.cpp abort instead of reporting an error.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llama_phase.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEEP_ELEMENTS = 4096  # longer arrays (vocabularies) are skipped: nothing here needs them
_SANE_COUNT = 1 << 24  # of tensors, keys, and bytes of one text
_MAX_DIMS = 4  # of ggml
_MAX_LAYERS = 512  # of llama.cpp: LLAMA_MAX_LAYERS
# ggml type: (elements per block, bytes per block), from ggml.h and ggml-common.h of the pinned source
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip
LAYER = re.compile(r"^blk\.(\d{1,9})\.(.+)$")  # name of a layer's tensor: number, the rest
_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_REDOWNLOAD = "download the file again"
_LOOKS_LIKE = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file it stands for", "run `git lfs pull` in its folder"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint", "convert it with llama.cpp/convert_hf_to_gguf.py"),
    (b"tjgg", "a GGML file of before GGUF", "convert the original model again"),
    (b"fmgg", "a GGML file of before GGUF", "convert the original model again"),
    (b"lmgg", "a GGML file of before GGUF", "convert the original model again"),
    (b"FUGG", "a big-endian GGUF", "convert the model for little-endian machines"),
    (b"\0\0\0\0", "zeros at its start, as an interrupted download leaves", _REDOWNLOAD),
)


@dataclass(frozen=True)
class Header:
    """The header of one file. `tensors` maps names to (dims, ggml type, offset in the data section)."""

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    data_start_bytes: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def of_arch(self, key: str, default: object = None) -> object:
        """Value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int = 0) -> int:
        """Integer value of `<architecture>.<key>`; `default` when it is absent, negative or not an integer."""
        value = self.of_arch(key)
        return value if isinstance(value, int) and value >= 0 else default

    @property
    def needed_bytes(self) -> int:
        """Size the file must have for the tensors it lists; tensors of types unknown here count as empty."""
        end = self.data_start_bytes if self.tensors else 0
        for dims, kind, offset in self.tensors.values():
            end = max(end, self.data_start_bytes + offset + (tensor_bytes(dims, kind) or 0))
        return end


def tensor_bytes(dims: tuple[int, ...], kind: int) -> int | None:
    """Size of a tensor of this ggml type without padding, None when the type is unknown here."""
    if kind not in _BLOCKS:
        return None
    elements, size = _BLOCKS[kind]
    return prod(dims) // elements * size


def read_header(path: Path) -> Header:
    """Parse the header of one GGUF. Raises ModelError when the file is missing, unreadable, cut off or no GGUF."""
    try:
        # without waiting: a pipe that nobody writes to would never open
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is no regular file but a pipe or a device", fix="name a .gguf file")
            size = file.seek(0, 2)
            if size == 0:
                raise ModelError(f"{path} is empty", fix=_REDOWNLOAD)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_magic(path, data)
                return _parse(path, data)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}", fix="check the path") from None
    except IsADirectoryError:
        inside = sorted(item.name for item in path.glob("*.gguf"))[:3]
        fix = f"name a file in it, for example {path / inside[0]}" if inside else "name a .gguf file"
        raise ModelError(f"{path} is a folder", fix=fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read {path}: {reason}", fix="check the path, the file and its permissions") from None


def _check_magic(path: Path, data: mmap.mmap) -> None:
    head = data[:512]
    if head[:4] == b"GGUF":
        return
    for magic, what, fix in _LOOKS_LIKE:
        if head.startswith(magic):
            raise ModelError(f"{path} is no GGUF: it has the look of {what}", fix=fix)
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(
            f"{path} is no GGUF: it is a web page, probably the answer to a download that needs a login",
            fix="download the file itself",
        )
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] < len(data):
        raise ModelError(
            f"{path} is no GGUF: it is a safetensors file", fix="convert it with llama.cpp/convert_hf_to_gguf.py"
        )
    raise ModelError(f"{path} is no GGUF: it starts with {head[:4]!r} instead of b'GGUF'", fix="name a .gguf file")


class _Cursor:
    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 4

    def take(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise struct.error("past the end")

    def string(self) -> str:
        length = self.take("Q")
        if length > _SANE_COUNT:
            raise KeyError(length)
        start = self.at
        self.skip(length)
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        item, count = self.take("I"), self.take("Q")
        if item == _STRING:
            if count <= _KEEP_ELEMENTS:
                return [self.string() for _ in range(count)]
            for _ in range(count):
                self.skip(self.take("Q"))
            return None
        code = _SCALARS[item]  # an array of arrays is none: ggml reads none either
        if count > _KEEP_ELEMENTS:
            self.skip(count * struct.calcsize("<" + code))
            return None
        start = self.at
        self.skip(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    try:
        version = cursor.take("I")
        if version not in (2, 3):
            raise ModelError(
                f"{path} is a GGUF of version {version}; this engine reads 2 and 3", fix="convert the model again"
            )
        n_tensors, n_kv = cursor.take("Q"), cursor.take("Q")
        if max(n_tensors, n_kv) > _SANE_COUNT:
            raise ModelError(f"{path} is damaged: {n_tensors} tensors, {n_kv} keys", fix=_REDOWNLOAD)
        metadata: dict[str, object] = {}
        for _ in range(n_kv):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.take("I"))
        tensors = {}
        for _ in range(n_tensors):
            name = cursor.string()
            n_dims = cursor.take("I")
            if n_dims > _MAX_DIMS:
                raise KeyError(n_dims)
            dims = tuple(cursor.take("Q") for _ in range(n_dims))
            tensors[name] = (dims, cursor.take("I"), cursor.take("Q"))
    except struct.error:
        raise ModelError(
            f"{path} is cut off inside its header ({len(data)} bytes)", fix=f"{_REDOWNLOAD}, or resume it"
        ) from None
    except (KeyError, MemoryError):
        raise ModelError(f"{path} is damaged near byte {cursor.at}", fix=_REDOWNLOAD) from None
    alignment = metadata.get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    start = -(-cursor.at // alignment) * alignment
    return Header(path, version, metadata, tensors, start, len(data))


def shard_paths(path: Path, count: int) -> list[Path]:
    """Paths of all shards of the model whose first shard is `path`.

    Made from the name as given: in symlinked caches the link's target has another name and no siblings.
    Raises ModelError when the name is not the one of a first shard of `count`.
    """
    match = _SHARD_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path} is one of {count} shards but is not named so",
            fix=f"name it as it was published: ...-00001-of-{count:05}.gguf",
        )
    names = [f"{match['stem']}-{no:05}-of-{count:05}.gguf" for no in range(1, count + 1)]
    if int(match["no"]) != 1:
        raise ModelError(
            f"{path} is shard {int(match['no'])} of {count}; a model is loaded by its first",
            fix=f"give {path.with_name(names[0])}",
        )
    return [path.with_name(name) for name in names]


def check_model(path: Path, *, draft: bool = False) -> list[Header]:
    """Refuse a model that cannot be served, before anything is loaded; the headers of all its files otherwise.

    `draft`: the file is used as a draft model, for which an MTP block alone is right.
    Raises ModelError: missing, unreadable, not a GGUF, cut off, shards missing (all are listed), MTP block only, or
    metadata on which the engine would abort.
    """
    match = _SHARD_NAME.match(path.name)
    paths = shard_paths(path, int(match["count"])) if match and not _missing(path) else [path]
    missing = [item.name for item in paths if _missing(item)] if len(paths) > 1 else []
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(paths)} shards are missing in {path.parent}: {', '.join(missing)}",
            fix="download them into the same folder",
        )
    headers = [read_header(item) for item in paths]
    count = headers[0].metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1 and count != len(paths):
        shard_paths(path, count)
    for header in headers:
        if header.needed_bytes > header.file_bytes:
            raise ModelError(
                f"{header.path} is cut off: {header.file_bytes} bytes, its tensors need {header.needed_bytes}",
                fix=f"{_REDOWNLOAD}, or resume it",
            )
    if not headers[0].architecture:
        raise ModelError(f"{path} has no general.architecture: it holds no model", fix="name a model's .gguf file")
    layers = headers[0].number("block_count")
    if layers > _MAX_LAYERS:
        raise ModelError(f"{path} claims {layers} layers, and the engine takes {_MAX_LAYERS} at most", fix=_REDOWNLOAD)
    names = {name for header in headers for name in header.tensors}
    _check_contents(headers[0], names, draft)
    return headers


def _missing(path: Path) -> bool:
    """Whether it is not there. What cannot be looked at may be there: opening it says why not."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _check_contents(header: Header, names: set[str], draft: bool) -> None:
    nextn = header.number("nextn_predict_layers")
    trunk = header.number("block_count") - nextn
    has_trunk = any(int(match[1]) < trunk for match in map(LAYER.match, names) if match)
    if nextn > 0 and not has_trunk:
        if not draft:
            raise ModelError(
                f"{header.path} holds an MTP block only, no model it could draft for",
                fix="give the main model, and this file after `--` as the draft: -md FILE --spec-type draft-mtp",
            )
    elif header.architecture in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp"):
        _check_attention(header, trunk)
    if header.architecture == "qwen4exp":
        _check_indexer(header)


def _check_attention(header: Header, trunk: int) -> None:
    """Linear-attention hybrids need a full-attention layer in the trunk: positions live in its KV cache."""
    recurrent = header.of_arch("attention.recurrent_layers")
    if isinstance(recurrent, list):
        if not all(recurrent[:trunk]):
            return
        key, value = "attention.recurrent_layers", "all true"
    else:
        interval = header.number("full_attention_interval", 4)
        if interval <= trunk:
            return
        key, value = "full_attention_interval", str(interval)
    raise ModelError(
        f"{header.path} has no attention layer in its trunk: {header.architecture}.{key} is {value}, "
        f"the trunk has {trunk} layers",
        fix="convert the model again, the engine would abort on it",
    )


def _check_indexer(header: Header) -> None:
    """The indexer's keys are rotated with the main rope width, so they have to be at least as wide."""
    ratios = header.of_arch("attention.compress_ratios", 0)
    if not any(ratios if isinstance(ratios, list) else [ratios]):
        return
    heads = header.of_arch("attention.head_count", 1)
    heads = (heads or [1])[0] if isinstance(heads, list) else heads
    width = header.number("embedding_length") // (heads if isinstance(heads, int) and heads else 1)
    rope = header.number("rope.dimension_count", header.number("attention.key_length", width))
    key_length = header.number("attention.indexer.key_length")
    if 0 < key_length < rope:
        raise ModelError(
            f"{header.path}: {header.architecture}.attention.indexer.key_length is {key_length}, less than "
            f"{header.architecture}.rope.dimension_count, {rope}",
            fix="convert the model again, the engine would abort on it",
        )
