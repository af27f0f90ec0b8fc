"""A real tokenizer for a synthetic model, cut or padded to the wanted number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llama_phase.errors import ModelError, UsageError

from .gguf_file import read_kv
from .spec import ModelSpec

BYTE_TOKENS = 256  # a byte-level BPE begins with these


@dataclass(frozen=True)
class Vocabulary:
    """What the metadata needs, and ``generable`` [n_tokens] (bool): complete printable UTF-8 on its own, no special."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    special_ids: dict[str, int]  # "eos_token_id" and the like
    pre: str
    chat_template: str | None
    generable: np.ndarray


def load_vocabulary(spec: ModelSpec, source: Path) -> Vocabulary:
    """The tokenizer of ``spec.vocab_file``, with ``spec.vocab`` tokens: the first ones, then the specials.

    Raises UsageError if the file is not there or the specials alone are more than ``spec.vocab``, ModelError if it is
    no byte-level BPE vocabulary.
    """
    path = Path(spec.vocab_file)
    if path.name == spec.vocab_file:
        path = source / "models" / path
    if not path.is_file():
        raise UsageError(f"--vocab-file {path} does not exist", fix="name a GGUF file with a vocabulary")
    kv = {key: value for key, value in read_kv(path).items() if key.startswith("tokenizer.")}
    try:
        tokens, types, merges = (kv["tokenizer.ggml." + key] for key in ("tokens", "token_type", "merges"))
        pre = kv["tokenizer.ggml.pre"]
    except KeyError as error:
        raise ModelError(f"{path} has no {error}", fix="name a GGUF file with a byte-level BPE vocabulary") from None
    ids = {k.removeprefix("tokenizer.ggml."): v for k, v in kv.items() if k.endswith("_token_id")}
    n = spec.vocab or len(tokens)
    if n < len(tokens):
        tokens, types, merges, ids = _cut(spec, tokens, types, merges, ids)
    for i in range(len(tokens), n):
        tokens.append(f"[PAD{i}]")
        types.append(int(gguf.TokenType.UNUSED))
    return Vocabulary(tokens, types, merges, ids, pre, kv.get("tokenizer.chat_template"), _generable(tokens, types))


def _cut(
    spec: ModelSpec, tokens: list[str], types: list[int], merges: list[str], ids: dict[str, int]
) -> tuple[list[str], list[int], list[str], dict[str, int]]:
    special = [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    smallest = BYTE_TOKENS + len(special)
    if spec.vocab < smallest:
        raise UsageError(
            f"--vocab {spec.vocab} is below the {smallest} bytes and special tokens of {spec.vocab_file}",
            fix=f"pass --vocab {smallest} or more, or 0 for all",
        )
    # ids follow the order of the merges, so a prefix of the ids needs only a prefix of the merges
    keep = list(range(spec.vocab - len(special))) + special
    new_id = {old: new for new, old in enumerate(keep)}
    kept = [tokens[i] for i in keep]
    known = set(kept)
    merges = [m for m in merges[: spec.vocab - BYTE_TOKENS] if "".join(m.split(" ")) in known]
    return kept, [types[i] for i in keep], merges, {name: new_id[i] for name, i in ids.items()}


def _generable(tokens: list[str], types: list[Any]) -> np.ndarray:
    """bool [n_tokens]. Tokens are spelt in the byte-to-unicode alphabet of GPT-2."""
    alphabet = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    for j, byte in enumerate(b for b in range(256) if chr(b) not in alphabet):
        alphabet[chr(256 + j)] = byte
    ok = np.zeros(len(tokens), bool)
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == gguf.TokenType.NORMAL:
            try:
                ok[i] = bytes(alphabet[c] for c in token).decode().isprintable()
            except (KeyError, UnicodeDecodeError):
                continue
    return ok
