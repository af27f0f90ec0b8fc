"""Model files that cannot be served are refused before anything is loaded, with what is wrong and what to do."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gguf import TRUNK, write_gguf
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sparse_gguf import write_sparse

from llama_phase.errors import ModelError
from llama_phase.gguf_header import check_model, read_header

MTP = ("token_embd.weight", "blk.2.nextn.eh_proj.weight")
INDEXER = {
    ".attention.compress_ratios": 4,
    ".attention.indexer.key_length": 64,
    ".rope.dimension_count": 64,
    ".full_attention_interval": 2,
}


def refusal(path: Path, **options: bool) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_model(path, **options)
    assert caught.value.fix
    return caught.value


def test_a_good_model_passes_and_long_arrays_are_skipped(tmp_path: Path) -> None:
    arrays = {"tokenizer.ggml.tokens": ["a"] * 5000, "x.ids": [1] * 5000, "x.few": [1, 2]}
    path = write_gguf(tmp_path / "m.gguf", arrays)
    header = check_model(path)[0]
    assert header.architecture == "qwen3moe"
    assert header.number("block_count") == 2
    assert header.metadata["x.few"] == [1, 2]
    assert header.metadata["tokenizer.ggml.tokens"] is None
    assert header.needed_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>login</html>", "web page"),
        (b"\n <html><body>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS"),
        (struct.pack("<Q", 20) + json.dumps({"__metadata__": {}}).encode() + b" " * 40, "safetensors"),
        (b"PK\x03\x04" + b"\1" * 100, "zip"),
        (bytes(4096), "interrupted"),
        (b"tjgg" + bytes(100), "before GGUF"),
        (b"#!/bin/sh\n", "starts with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "damaged"),
    ],
)
def test_what_is_no_gguf_is_named_for_what_it_is(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error = refusal(path)
    assert word in str(error) and str(path) in str(error)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "no file" in str(refusal(tmp_path / "none.gguf"))
    write_gguf(tmp_path / "inside.gguf")
    error = refusal(tmp_path)
    assert "folder" in str(error) and "inside.gguf" in error.fix


def test_a_download_cut_off_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", {"tokenizer.ggml.tokens": ["word"] * 5}).read_bytes()
    for size in range(4, len(whole), 7):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        assert "cut off" in str(refusal(path)), size
    path.write_bytes(whole[:-1])
    assert f"{len(whole) - 1} bytes" in str(refusal(path))


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(position=st.integers(4, 400), junk=st.binary(min_size=1, max_size=16))
def test_damaged_bytes_never_end_in_a_traceback(tmp_path: Path, position: int, junk: bytes) -> None:
    data = bytearray(write_gguf(tmp_path / "whole.gguf", {"tokenizer.ggml.tokens": ["word"] * 5}).read_bytes())
    data[position : position + len(junk)] = junk
    path = tmp_path / "junk.gguf"
    path.write_bytes(data)
    try:
        check_model(path)
    except ModelError as error:
        assert str(path) in str(error)


def number(value: int) -> bytes:
    """A metadata value of 64 bits."""
    return struct.pack("<IQ", 10, value) if value >= 0 else struct.pack("<Iq", 11, value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: _socket(path)])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "m.gguf"
    kept = make(path)
    assert str(path) in str(refusal(path))
    del kept


def _socket(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    return listening


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [513, 2**32 - 1, 2**63])
def test_no_work_is_done_for_layers_that_cannot_be(tmp_path: Path, count: int) -> None:
    path = write_sparse(tmp_path / "m.gguf", {"general.architecture": "x", "x.block_count": number(count)}, {})
    assert str(count) in str(refusal(path))


def test_a_header_deeper_or_wider_than_ggml_reads_is_damaged(tmp_path: Path) -> None:
    arrays = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    text = struct.pack("<IQ", 8, 1 << 40)
    for value in (arrays, text):
        path = write_sparse(tmp_path / "m.gguf", {"general.architecture": "x", "x.y": value}, {})
        assert "damaged" in str(refusal(path))
    path = write_sparse(tmp_path / "m.gguf", {"general.architecture": "x"}, {"blk.0.x": ((1,) * 5, 0)})
    assert "damaged" in str(refusal(path))


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.gguf"])
def test_a_path_that_cannot_be_looked_at_is_said(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name too long" in str(refusal(tmp_path / ("x" * 300 + name))).lower()
    assert "null" in str(refusal(tmp_path / f"a\0{name}"))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for function in ("stat", "open"):  # root may search every folder
        monkeypatch.setattr(os, function, denied)
    error = refusal(tmp_path / name)
    monkeypatch.undo()
    assert "ermission denied" in str(error) and name in str(error)


def shards(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [
        write_gguf(
            folder / f"m-{no:05}-of-{count:05}.gguf",
            {"split.count": count, "split.no": no - 1},
            TRUNK if no == 1 else (f"blk.{no}.ffn.weight",),
        )
        for no in range(1, count + 1)
    ]


def test_l11_every_missing_shard_is_listed_before_loading(tmp_path: Path) -> None:
    paths = shards(tmp_path, 13)
    assert len(check_model(paths[0])) == 13
    for no in (2, 7):
        paths[no - 1].unlink()
    text = str(refusal(paths[0]))
    assert "2 of 13" in text and "m-00002-of-00013.gguf" in text and "m-00007-of-00013.gguf" in text


def test_l11_a_symlinked_cache_works_and_its_missing_shards_are_seen(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    snapshot.mkdir()
    for index, path in enumerate(shards(blobs, 3)):
        blob = path.rename(blobs / f"{index:064x}")
        os.symlink(blob, snapshot / path.name)
    first = snapshot / "m-00001-of-00003.gguf"
    assert len(check_model(first)) == 3
    (blobs / f"{1:064x}").unlink()  # the link stays, its target is gone
    assert "m-00002-of-00003.gguf" in str(refusal(first))


def test_shards_out_of_place(tmp_path: Path) -> None:
    paths = shards(tmp_path, 3)
    assert "m-00001-of-00003.gguf" in refusal(paths[1]).fix
    assert "-00001-of-00003.gguf" in refusal(paths[0].rename(tmp_path / "renamed.gguf")).fix


def test_a_cut_off_second_shard_is_named(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    assert str(paths[1]) in str(refusal(paths[0]))


@pytest.mark.parametrize("architecture", ["qwen4exp", "qwen35moe", "glm4moe"])
def test_e22_an_mtp_block_alone_is_no_model_but_a_draft(tmp_path: Path, architecture: str) -> None:
    keys = {".block_count": 3, ".nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "mtp.gguf", keys, MTP, architecture=architecture)
    error = refusal(path)
    assert "MTP" in str(error) and "-md" in error.fix
    assert check_model(path, draft=True)
    with_trunk = write_gguf(tmp_path / "m.gguf", keys | INDEXER, MTP + TRUNK, architecture=architecture)
    assert check_model(with_trunk)


def test_e23_indexer_keys_narrower_than_the_rope(tmp_path: Path) -> None:
    def model(**change: int) -> Path:
        keys = INDEXER | {"." + key.replace("__", "."): value for key, value in change.items()}
        return write_gguf(tmp_path / "m.gguf", keys, architecture="qwen4exp")

    assert check_model(model())
    text = str(refusal(model(attention__indexer__key_length=32)))
    assert "indexer.key_length is 32" in text and "rope.dimension_count, 64" in text
    # a dense model does not use its indexer
    assert check_model(model(attention__indexer__key_length=32, attention__compress_ratios=0))


@pytest.mark.parametrize("architecture", ["qwen4exp", "qwen35", "qwen35moe", "qwen3next"])
def test_e23_a_trunk_without_attention_layer(tmp_path: Path, architecture: str) -> None:
    def model(key: str, value: object) -> Path:
        return write_gguf(tmp_path / "m.gguf", {key: value}, architecture=architecture)

    assert check_model(model(".full_attention_interval", 2))
    assert "full_attention_interval is 4, the trunk has 2" in str(refusal(model(".full_attention_interval", 4)))
    assert "recurrent_layers" in str(refusal(model(".attention.recurrent_layers", [True, True])))
    assert check_model(model(".attention.recurrent_layers", [True, False]))


def test_headers_of_the_vocabularies_upstream_ships_are_read() -> None:
    folder = Path(__file__).parent.parent / "llama.cpp" / "models"
    paths = sorted(folder.glob("*.gguf"))
    if not paths:
        pytest.skip("no pinned source here: make source")
    for path in paths:
        header = read_header(path)
        assert header.architecture and not header.tensors, path
