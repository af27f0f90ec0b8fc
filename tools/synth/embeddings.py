"""Token embeddings, and an LM head that makes greedy text varied, peaked and cheap to guess.

The head is random plus a planted successor for every token: token t votes for its successor with a logit of
``bigram`` times the std of the other logits, about half of which is context. Greedy text is then peaked (few near ties)
but depends on the context, and the MTP block, which carries the token embedding, is accepted often.

``locality`` puts embeddings into clusters. Successors stay in a cluster for a while before they move to another one,
so consecutive tokens share experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .blocks import Type, encode, generator_for
from .spec import TOKEN_ROWS, ModelSpec
from .tensors import TensorList

HEAD_ROWS = 256  # rows of the head generated together


@dataclass(frozen=True)
class TokenChunk:
    """Up to TOKEN_ROWS consecutive tokens; indices are within the chunk."""

    embeddings: np.ndarray  # F32 [n_tokens, n_embd], rms 1
    cluster_of: np.ndarray  # [n_tokens]
    centers: np.ndarray  # F32 [n_clusters, n_embd]: the part of an embedding that its cluster shares
    predecessor: np.ndarray  # [n_tokens], -1 for a token that is nobody's successor
    rng: np.random.Generator  # in the state the head continues from


def token_chunk(spec: ModelSpec, generable: np.ndarray, index: int) -> TokenChunk:
    """Chunk ``index`` of the vocabulary. Embeddings and head both start from it, so it is made twice, not kept."""
    rng = generator_for(spec.seed, f"tokens.{index}")
    here = generable[index * TOKEN_ROWS : (index + 1) * TOKEN_ROWS]
    n = len(here)
    order = rng.permutation(np.flatnonzero(here))
    n_clusters = TOKEN_ROWS // spec.cluster
    cluster_of = rng.integers(0, n_clusters, n)
    cluster_of[order] = np.arange(len(order)) // spec.cluster
    predecessor = _predecessors(spec, rng, order, n)
    x = rng.standard_normal((n, spec.n_embd), dtype=np.float32)
    x *= np.float32(math.sqrt(1 - spec.locality))
    centers = rng.standard_normal((n_clusters, spec.n_embd), dtype=np.float32) * np.float32(math.sqrt(spec.locality))
    x += centers[cluster_of]
    return TokenChunk(x, cluster_of, centers, predecessor, rng)


def _predecessors(spec: ModelSpec, rng: np.random.Generator, order: np.ndarray, n: int) -> np.ndarray:
    """Cycles through the generable tokens; one visit to a cluster takes a quarter of its tokens."""
    visit = max(1, spec.cluster // 4)
    visits = [order[i : i + visit] for i in range(0, len(order), visit)]
    order = np.concatenate([visits[i] for i in rng.permutation(len(visits))] or [order])
    predecessor = np.full(n, -1)
    length = spec.cycle or max(1, len(order))
    for i in range(0, len(order), length):
        cycle = order[i : i + length]
        predecessor[np.roll(cycle, -1)] = cycle
    return predecessor


def add_embeddings(plan: TensorList, generable: np.ndarray) -> None:
    """token_embd and output, both [n_embd, n_tokens]. ``generable`` is Vocabulary.generable."""
    spec = plan.spec
    n_tokens, h = len(generable), spec.block_input_rms  # the head reads the same kind of input as a block
    kind = Type[spec.embd_type]
    noise = spec.logit_std / (h * math.sqrt(spec.n_embd))
    # the successor must also win against the rest of its cluster, which gets the share `locality` of the vote
    vote = max(spec.bigram, 0.6 * spec.bigram / (1 - spec.locality))
    signal = vote * spec.logit_std * math.sqrt(1 + spec.ctx**2) / (h * spec.n_embd)
    n_chunks = -(-n_tokens // TOKEN_ROWS)

    def embedding_rows() -> Iterator[np.ndarray]:
        for k in range(n_chunks):
            yield encode(kind, token_chunk(spec, generable, k).embeddings)

    def head_rows() -> Iterator[np.ndarray]:
        for k in range(n_chunks):
            chunk = token_chunk(spec, generable, k)
            x = chunk.embeddings
            for i in range(0, len(x), HEAD_ROWS):
                rows = slice(i, i + HEAD_ROWS)
                before = chunk.predecessor[rows]
                w = chunk.rng.standard_normal((len(before), spec.n_embd), dtype=np.float32) * np.float32(noise)
                # half a vote against the token itself, or text ends in one repeated token
                own = x[rows] - chunk.centers[chunk.cluster_of[rows]]
                w += np.float32(signal) * (x[before] - np.float32(0.5) * own)
                w[before < 0] = 0  # specials and partial characters: logit 0, never the greedy choice
                yield encode(kind, w)

    plan.add("token_embd.weight", (spec.n_embd, n_tokens), kind, embedding_rows)
    plan.add("output.weight", (spec.n_embd, n_tokens), kind, head_rows)
