"""What a synthetic model is made of: one frozen value, and its presets."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

ARCHITECTURES = ("qwen4exp", "qwen35moe", "qwen3moe", "gpt-oss")
WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K")
CHOICES = {
    "arch": ARCHITECTURES,
    "mtp": ("yes", "no", "only"),
    "dense_type": WEIGHT_TYPES,
    "embd_type": WEIGHT_TYPES[:4],  # rows are encoded from floats, for which there is no Q4_K here
}
TOKEN_ROWS = 4096  # token rows generated together; a token's successor is always in its own chunk
GENERATOR = 1  # part of the recorded flags: raise it when the same flags give other bytes


def _flag(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and statistics of a model. Field names are the command line's flags, with _ for -."""

    arch: str = _flag("qwen4exp", "architecture")
    layers: int = _flag(8, "trunk layers; the MTP block comes on top")
    n_embd: int = _flag(256, "residual width")
    heads: int = _flag(4, "query heads")
    heads_kv: int = _flag(2, "key and value heads")
    head_dim: int = _flag(64, "width of a head")
    rope_dim: int = _flag(32, "rotated part of a head (qwen3moe and gpt-oss rotate all of it)")
    experts: int = _flag(32, "experts per layer")
    experts_used: int = _flag(4, "experts per token")
    n_ff_exp: int = _flag(128, "hidden width of an expert")
    n_ff_shexp: int = _flag(0, "hidden width of the shared expert; 0: as n_ff_exp")
    lin_heads_k: int = _flag(2, "gated delta net: key heads")
    lin_heads_v: int = _flag(4, "gated delta net: value heads")
    lin_dim: int = _flag(64, "gated delta net: width of a head")
    conv_kernel: int = _flag(4, "taps of the short convolutions")
    attn_every: int = _flag(4, "every n-th layer is an attention layer, the others are gated delta nets")
    hc: int = _flag(4, "hyper-connection streams")
    hc_rank: int = _flag(32, "rank of the hyper-connection mixers")
    idx_heads: int = _flag(4, "QSA indexer: heads")
    idx_dim: int = _flag(64, "QSA indexer: width of a head")
    idx_topk: int = _flag(256, "QSA indexer: K/V rows a token attends to (may exceed the context)")
    idx_ratio: int = _flag(4, "QSA indexer: rows per selected group; 0: dense attention")
    ple: bool = _flag(True, "n-gram embeddings (PLE); without, llama.cpp restores state wrongly past idx_topk")
    ple_heads: int = _flag(2, "PLE heads per n-gram order (orders 2 and 3)")
    ple_vocab: int = _flag(4096, "PLE rows per head")
    mtp: str = _flag("yes", "MTP block: yes, no, or only (block, embeddings and head, as a draft for -md)")
    vocab: int = _flag(8192, "tokens; 0: all of the vocabulary file")
    vocab_file: str = _flag("ggml-vocab-qwen35.gguf", "tokenizer: a path, or a name in the source's models/")
    ctx_train: int = _flag(262144, "context length written to the metadata")
    expert_type: str = _flag("Q4_0", "type of experts and PLE table; several, by commas: blocks take them in turn")
    dense_type: str = _flag("Q8_0", "type of the other matrices")
    embd_type: str = _flag("Q8_0", "type of token embeddings and LM head")
    seed: int = _flag(1, "seed of everything")
    locality: float = _flag(0.4, "share of the embedding variance common to a cluster; higher: more expert reuse")
    cluster: int = _flag(64, "tokens per cluster")
    cycle: int = _flag(0, "length of the successor cycles; 0: the whole chunk of token rows")
    bigram: float = _flag(8.0, "logit of a token's successor, in std of the other logits; 0: a purely random head")
    logit_std: float = _flag(3.0, "std of the other logits")
    ctx: float = _flag(1.0, "rms that all blocks together add to the embedding (rms 1)")
    router_std: float = _flag(2.5, "std of the router logits")
    skew: float = _flag(0.0, "spread of the experts' popularity, as log std")
    distinct_limit: float = _flag(4.0, "GB of experts up to which each is drawn on its own; above: rows of a pool")
    pool: int = _flag(16, "size of that pool, in experts")

    @property
    def has_hyper_connections(self) -> bool:
        return self.arch == "qwen4exp"

    @property
    def is_hybrid(self) -> bool:
        """Gated delta nets beside attention layers."""
        return self.arch in ("qwen4exp", "qwen35moe")

    @property
    def has_biases(self) -> bool:
        """On attention, router and experts."""
        return self.arch == "gpt-oss"

    @property
    def expert_types(self) -> list[str]:
        """Block i has the i-th, counted round; the PLE table the first."""
        return self.expert_type.split(",")

    @property
    def has_trunk(self) -> bool:
        return self.mtp != "only"

    @property
    def has_mtp(self) -> bool:
        return self.mtp != "no"

    @property
    def blocks(self) -> int:
        """llama.cpp's block_count: trunk layers and the MTP block."""
        return self.layers + self.has_mtp

    @property
    def block_input_rms(self) -> float:
        """rms of what a block reads: after a norm 1, after a hyper-connection mixer with gate sigmoid(0) 0.5."""
        return 0.5 if self.has_hyper_connections else 1.0

    @property
    def block_output_rms(self) -> float:
        """rms of what each half block adds, so that the residual does not depend on depth."""
        return self.ctx / math.sqrt(2 * self.layers)

    def is_recurrent(self, layer: int) -> bool:
        return self.is_hybrid and layer < self.layers and (layer + 1) % self.attn_every != 0

    def flags(self) -> str:
        """The value as stable text; equal text means equal bytes."""
        return json.dumps({**asdict(self), "vocab_file": self.vocab_file.rpartition("/")[2], "generator": GENERATOR})


# Quantized weights make logits depend on the batch split (activations are rounded to 8 bits; noise 2e-2), so the tiny
# presets quantize the experts at most. The exact ones are F32 throughout: with `-fa off` the CPU's logits are equal bit
# for bit for any split. Flash attention leaves noise of up to 2e-3, which a near tie shows once in about 1500 tokens.
_F32_DENSE = {"dense_type": "F32", "embd_type": "F32"}
_F32_SMALL = {**_F32_DENSE, "expert_type": "F32", "n_embd": 128, "n_ff_exp": 64}
_FLASH_NEXT = {
    "head_dim": 256, "rope_dim": 64, "experts": 512, "experts_used": 10, "lin_heads_k": 16, "lin_dim": 128,
    "hc_rank": 320, "idx_dim": 128, "idx_topk": 2048, "ple_heads": 8,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_F32_DENSE},
    "tiny-exact": {**_F32_SMALL},
    "tiny-moe": {**_F32_DENSE, "arch": "qwen3moe", "mtp": "no"},
    "tiny-moe-exact": {**_F32_SMALL, "arch": "qwen3moe", "mtp": "no"},
    "tiny-35": {**_F32_DENSE, "arch": "qwen35moe"},
    "tiny-35-exact": {**_F32_SMALL, "arch": "qwen35moe"},
    # 13 GB
    "flash-next-small": {
        **_FLASH_NEXT, "layers": 24, "n_embd": 2048, "heads": 16, "n_ff_exp": 256, "lin_heads_v": 32, "vocab": 0,
        "ple_vocab": 65536,
    },
    # the shape of Qwen3.8-Flash-Next: 104 GB, of which 29 GB are the PLE table
    "flash-next": {
        **_FLASH_NEXT, "layers": 48, "n_embd": 2560, "heads": 24, "n_ff_exp": 640, "lin_heads_v": 48, "vocab": 248320,
        "ple_vocab": 20_000_000,
    },
}  # fmt: skip
