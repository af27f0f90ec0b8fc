"""Random weights as the raw bytes of a tensor type.

No float matrix is ever quantized: integer codes are drawn directly as sums of uniform bit fields, which is close to a
gaussian, and is done on 8 bytes at a time. One block of each type holds

    Q8_0   32 weights  d (f16), 32 x int8                          weight = d * q
    Q4_0   32 weights  d (f16), 16 x two nibbles                   weight = d * (q - 8)
    Q4_K  256 weights  d, dmin (f16), 12 x scales, 128 x nibbles   weight = d * scale * q - dmin * min
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType

# std of the codes below
_Q4_0_STD = math.sqrt(4 * 1.25)  # q - 8 for q in 2..14
_Q4_K_STD = math.sqrt(4 * 1.25 + 0.25)  # q - 7.5 for q in 1..14
_Q8_0_STD = math.sqrt(4 * (64**2 - 1) / 12)  # q in -126..126
_Q4_K_MEAN_SCALE = 52  # of the 6-bit scales in 41..63


def _gaussian_levels(n: int) -> np.ndarray:
    normal = NormalDist()
    half = np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n // 2)])
    return np.concatenate([half, -half[::-1]]).astype(np.float32)


_UNIT_GAUSSIAN = _gaussian_levels(1 << 16)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """An independent stream per tensor name, so models that differ by a flag share all other tensors."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def type_bytes(kind: Type) -> tuple[int, int]:
    """(weights, bytes) of one block."""
    return gguf.GGML_QUANT_SIZES[kind]


def draw(rng: np.random.Generator, kind: Type, n: int, std: float) -> np.ndarray:
    """``n`` weights of mean 0 and the given std, as uint8 bytes. ``n`` is a multiple of the type's block."""
    if kind in (Type.F32, Type.F16):
        levels = (_UNIT_GAUSSIAN * std).astype(np.float32 if kind == Type.F32 else np.float16)
        return levels[_words(rng, -(-n // 4)).view(np.uint16)[:n]].view(np.uint8)
    weights, size = type_bytes(kind)
    blocks = n // weights
    out = np.empty((blocks, size), np.uint8)
    if kind == Type.Q4_0:
        out[:, :2] = _block_scales(rng, blocks, std / _Q4_0_STD)
        out[:, 2:] = _nibbles(rng, blocks * 16, half=False).reshape(blocks, 16)
    elif kind == Type.Q8_0:
        out[:, :2] = _block_scales(rng, blocks, std / _Q8_0_STD)
        out[:, 2:] = _octets(rng, blocks * 32).reshape(blocks, 32)
    elif kind == Type.Q4_K:
        # min = scale and dmin = 7.5 d make the block symmetric: weight = d * scale * (q - 7.5)
        spread = rng.random(blocks, dtype=np.float32) * 0.5 + 0.75
        d = (std / _Q4_K_STD / _Q4_K_MEAN_SCALE * spread).astype(np.float16)
        scale = rng.integers(41, 64, (blocks, 8), dtype=np.uint8)
        first, last = scale[:, :4], scale[:, 4:]
        out[:, 0:2] = d.view(np.uint8).reshape(blocks, 2)
        out[:, 2:4] = (d * np.float16(7.5)).view(np.uint8).reshape(blocks, 2)
        out[:, 4:8] = out[:, 8:12] = first | (last >> 4) << 6
        out[:, 12:16] = (last & 15) | (last & 15) << 4
        out[:, 16:] = _nibbles(rng, blocks * 128, half=True).reshape(blocks, 128)
    else:
        raise ValueError(f"no random {kind.name}")
    return out.reshape(-1)


def encode(kind: Type, rows: np.ndarray) -> np.ndarray:
    """Float rows as uint8 bytes, for the few matrices with structure."""
    if kind == Type.F32:
        return rows.astype(np.float32).view(np.uint8)
    if kind == Type.F16:
        return rows.astype(np.float16).view(np.uint8)
    if kind == Type.Q8_0:
        x = rows.reshape(-1, 32)
        d = (np.maximum(x.max(1), -x.min(1)) / 127).astype(np.float16)
        inverse = 1 / np.maximum(d.astype(np.float32), 1e-12)
        out = np.empty((len(x), 34), np.uint8)
        out[:, :2] = d.view(np.uint8).reshape(-1, 2)
        out[:, 2:] = np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8).view(np.uint8)
        return out.reshape(-1)
    return gguf.quants.quantize(rows.astype(np.float32), kind)


def _words(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.bit_generator.random_raw(n)


def _block_scales(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    """``n`` f16 scales spread evenly over mean +- 25 %, as bytes [n, 2]."""
    scales = rng.random(n, dtype=np.float32) * 0.5 + 0.75
    return (scales * mean).astype(np.float16).view(np.uint8).reshape(n, 2)


def _nibbles(rng: np.random.Generator, n: int, *, half: bool) -> np.ndarray:
    """``n`` bytes of two 4-bit codes each, of mean 7.5 (half) or 8."""
    words, mask = -(-n // 8), np.uint64(0x3333333333333333)
    codes = np.full(words, 0x1111111111111111 if half else 0x2222222222222222, np.uint64)
    for _ in range(2):
        bits = _words(rng, words)
        codes += bits & mask
        codes += (bits >> np.uint64(2)) & mask
    if half:
        codes += _words(rng, words) & np.uint64(0x1111111111111111)
    return codes.view(np.uint8)[:n]


def _octets(rng: np.random.Generator, n: int) -> np.ndarray:
    """``n`` 8-bit codes of mean 0."""
    codes = np.full(n, 2, np.int8)
    for _ in range(4):
        codes += _words(rng, -(-n // 8)).view(np.int8)[:n] >> 2
    return codes.view(np.uint8)
