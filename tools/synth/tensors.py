"""The tensors of a model, in file order. Nothing is generated before it is written, about 1 MB at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .blocks import Type, draw, generator_for, type_bytes
from .spec import ModelSpec

CHUNK_BYTES = 1 << 20  # fits the cache
PLE_PART_ROWS = 16384  # a large PLE table consists of slices of this many rows
MAX_DISTINCT_PLE_PARTS = 16
MAX_DISTINCT_PLE_ROWS = 1 << 24

Chunks = Callable[[], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Tensor:
    """``shape`` is in ggml order: shape[0] is the row length. ``chunks`` yields the bytes, the same at every call."""

    name: str
    shape: tuple[int, ...]
    type: Type
    chunks: Chunks

    @property
    def n_bytes(self) -> int:
        weights, size = type_bytes(self.type)
        if self.shape[0] % weights:
            raise ValueError(f"{self.name}: rows of {self.shape[0]} do not fit {self.type.name} blocks of {weights}")
        return math.prod(self.shape) // weights * size


class TensorList:
    """Tensors in the order they were added. Every matrix is scaled from the rms of its input."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.tensors: list[Tensor] = []
        self.dense_type = Type[spec.dense_type]
        self.expert_types = [Type[name] for name in spec.expert_types]
        sizes = [size / weights for weights, size in map(type_bytes, self.expert_types)]
        expert_bytes = 3 * spec.n_embd * spec.n_ff_exp * sum(sizes) / len(sizes)
        self.experts_are_pooled = spec.blocks * spec.experts * expert_bytes > spec.distinct_limit * 1e9
        self._pools: dict[str, np.ndarray] = {}

    def add(self, name: str, shape: tuple[int, ...], kind: Type, chunks: Chunks) -> None:
        self.tensors.append(Tensor(name, shape, kind, chunks))

    def vector(self, name: str, n: int, mean: float = 1.0, std: float = 0.05) -> None:
        self.values(name, n, lambda rng: mean + std * rng.standard_normal(n))

    def values(self, name: str, n: int, make: Callable[[np.random.Generator], np.ndarray]) -> None:
        """F32 [n], made by ``make`` from the tensor's own random stream."""
        self.add(name, (n,), Type.F32, lambda: iter([make(generator_for(self.spec.seed, name)).astype(np.float32)]))

    def matrix(self, name: str, n_in: int, n_out: int, out_rms: float, in_rms: float, kind: Type | None = None) -> None:
        """[n_in, n_out] that maps an input of rms ``in_rms`` to an output of rms ``out_rms``."""
        self.random(name, (n_in, n_out), out_rms / (in_rms * math.sqrt(n_in)), kind)

    def random(self, name: str, shape: tuple[int, ...], std: float, kind: Type | None = None) -> None:
        """Independent weights of the given std; type dense_type unless given, or what fits the row instead."""
        kind = type_for_rows(self.dense_type if kind is None else kind, shape[0])
        n = math.prod(shape)
        weights, size = type_bytes(kind)
        step = max(1, CHUNK_BYTES // size) * weights

        def chunks() -> Iterator[np.ndarray]:
            rng = generator_for(self.spec.seed, name)
            for i in range(0, n, step):
                yield draw(rng, kind, min(step, n - i), std)

        self.add(name, shape, kind, chunks)

    def experts(self, name: str, layer: int, n_in: int, n_out: int, std: float) -> None:
        """[n_in, n_out, experts]. Above --distinct-limit the experts share rows, but no two are the same function."""
        shape = (n_in, n_out, self.spec.experts)
        kind = type_for_rows(self.expert_types[layer % len(self.expert_types)], n_in)
        if self.experts_are_pooled:
            self._slices(name, shape, std, kind, self.spec.experts, n_out)
        else:
            self.random(name, shape, std, kind)

    def ple_table(self, name: str, n_in: int, n_rows: int) -> None:
        """[n_in, n_rows], rounded up to whole parts if it is too large to draw row by row."""
        parts = -(-n_rows // PLE_PART_ROWS)
        is_whole = n_rows == parts * PLE_PART_ROWS
        if (is_whole and parts > MAX_DISTINCT_PLE_PARTS) or n_rows > MAX_DISTINCT_PLE_ROWS:
            kind = type_for_rows(self.expert_types[0], n_in)
            self._slices(name, (n_in, parts * PLE_PART_ROWS), 1.0, kind, parts, PLE_PART_ROWS)
        else:
            self.random(name, (n_in, n_rows), 1.0, self.expert_types[0])

    def _slices(self, name: str, shape: tuple[int, ...], std: float, kind: Type, n_parts: int, rows: int) -> None:
        """``n_parts`` slices of ``rows`` rows out of one pool, each beginning at another row."""
        n_in = shape[0]
        weights, size = type_bytes(kind)
        row_bytes = n_in // weights * size
        span = max(self.spec.pool * rows, n_parts)
        key = f"pool.{kind.name}.{n_in}.{std:.9f}.{rows}"

        def chunks() -> Iterator[np.ndarray]:
            if key not in self._pools:
                pool = np.empty((span + rows) * row_bytes, np.uint8)
                rng, step = generator_for(self.spec.seed, key), max(1, CHUNK_BYTES // row_bytes)
                for i in range(0, span, step):
                    part = draw(rng, kind, min(step, span - i) * n_in, std)
                    pool[i * row_bytes : i * row_bytes + len(part)] = part
                pool[span * row_bytes :] = pool[: rows * row_bytes]
                self._pools[key] = pool
            pool = self._pools[key]
            for start in generator_for(self.spec.seed, name).permutation(span)[:n_parts]:
                yield pool[start * row_bytes : (start + rows) * row_bytes]

        self.add(name, shape, kind, chunks)


def type_for_rows(kind: Type, row: int) -> Type:
    """``kind``, or the next simpler type whose block divides the row (Q4_K becomes Q4_0, else F16)."""
    for candidate in (kind, Type.Q4_0 if kind == Type.Q4_K else Type.F16):
        if row % type_bytes(candidate)[0] == 0:
            return candidate
    return Type.F16
