"""From flags to a checked ModelSpec.

Combinations that llama.cpp rejects late, aborts on or computes wrongly are refused before a byte is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from llama_phase.errors import UsageError

from .spec import CHOICES, PRESETS, TOKEN_ROWS, WEIGHT_TYPES, ModelSpec

MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
GATED_DELTA_NET_DIMS = (16, 32, 64, 128)  # head widths its kernels exist for
MAX_PLE_ROWS = 2**31 - 1  # llama.cpp indexes the table with int32


def make_spec(preset: str, **overrides: Any) -> ModelSpec:
    """The preset with ``overrides`` (field names of ModelSpec), checked. Raises UsageError naming flag and values."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", fix="choose one of " + ", ".join(PRESETS))
    defaults = {f.name: f.default for f in fields(ModelSpec)}
    for name, value in overrides.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            raise UsageError(f"unknown model size {name!r}", fix=f"did you mean {near[0]!r}?" if near else "see --help")
        wanted = type(defaults[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UsageError(f"{name} is {value!r}, not of type {wanted.__name__}", fix="change its value")
    chosen = {**defaults, **PRESETS[preset], **overrides}
    chosen = {name: float(v) if isinstance(defaults[name], float) else v for name, v in chosen.items()}
    chosen["n_ff_shexp"] = chosen["n_ff_shexp"] or chosen["n_ff_exp"]
    chosen["ple"] = chosen["ple"] and chosen["arch"] == "qwen4exp" and chosen["mtp"] != "only"
    spec = ModelSpec(**chosen)
    check(spec)
    return spec


def check(spec: ModelSpec) -> None:
    """Raise UsageError for the first flag, or pair of flags, that cannot work. Every message names flags and values."""
    s = spec

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')} {getattr(s, name)}"

    def need(ok: bool, first: str, relation: str, second: str = "", fix: str = "") -> None:
        if not ok:
            other = flag(second) if second else ""
            change = f"change --{first.replace('_', '-')}" + (f" or --{second.replace('_', '-')}" if second else "")
            raise UsageError(f"{flag(first)} {relation} {other}".rstrip(), fix=fix or change)

    def at_least(bound: int, *names: str) -> None:
        for name in names:
            need(getattr(s, name) >= bound, name, f"is below {bound}")

    for name, allowed in CHOICES.items():
        need(getattr(s, name) in allowed, name, "is not one of " + ", ".join(allowed))
    known = set(s.expert_types) <= set(WEIGHT_TYPES)
    need(known, "expert_type", "is not one of " + ", ".join(WEIGHT_TYPES) + ", nor several, by commas")
    at_least(1, "layers", "n_embd", "heads", "heads_kv", "head_dim", "experts", "experts_used")
    at_least(1, "n_ff_exp", "n_ff_shexp", "ctx_train", "cluster", "pool")
    at_least(0, "vocab", "seed", "cycle", "bigram", "logit_std", "ctx", "router_std", "skew", "distinct_limit")
    need(s.experts_used <= s.experts, "experts_used", "exceeds", "experts")
    need(s.experts <= MAX_EXPERTS, "experts", f"is above llama.cpp's limit of {MAX_EXPERTS}")
    need(s.heads % s.heads_kv == 0, "heads", "is not a multiple of", "heads_kv")
    need(s.head_dim % 2 == 0, "head_dim", "is odd")
    for name in ("n_embd", "n_ff_exp", "n_ff_shexp"):
        need(getattr(s, name) % 32 == 0, name, "is not a multiple of 32, the smallest quantized block")
    need(s.locality < 1 and s.locality >= 0, "locality", "is outside [0, 1)")
    need(TOKEN_ROWS % s.cluster == 0, "cluster", f"does not divide {TOKEN_ROWS}")
    need(s.is_hybrid or not s.has_mtp, "mtp", "needs a block that llama.cpp lacks for", "arch", fix="pass --mtp no")
    if s.is_hybrid:
        _check_hybrid(s, need, at_least)
    if s.has_hyper_connections:
        _check_qwen4exp(s, need, at_least)


def _check_hybrid(s: ModelSpec, need: Callable[..., None], at_least: Callable[..., None]) -> None:
    at_least(1, "lin_heads_k", "lin_heads_v", "rope_dim")
    at_least(2, "conv_kernel", "attn_every")
    need(s.rope_dim % 2 == 0, "rope_dim", "is odd")
    need(s.rope_dim <= s.head_dim, "rope_dim", "exceeds", "head_dim")
    has_attention = s.layers >= s.attn_every or not s.has_trunk
    need(has_attention, "layers", "leaves the trunk without attention layer at", "attn_every")
    need(s.lin_heads_v % s.lin_heads_k == 0, "lin_heads_v", "is not a multiple of", "lin_heads_k")
    widths = ", ".join(map(str, GATED_DELTA_NET_DIMS))
    need(s.lin_dim in GATED_DELTA_NET_DIMS, "lin_dim", f"is not one of {widths}")


def _check_qwen4exp(s: ModelSpec, need: Callable[..., None], at_least: Callable[..., None]) -> None:
    at_least(2, "hc")
    at_least(1, "hc_rank", "idx_heads", "idx_topk")
    need(s.idx_ratio == 0 or s.idx_ratio > 1, "idx_ratio", "is neither 0 (dense attention) nor above 1")
    need(s.idx_ratio == 0 or s.idx_topk % s.idx_ratio == 0, "idx_topk", "is not a multiple of", "idx_ratio")
    need(s.idx_dim >= s.rope_dim, "idx_dim", "is below the width that the indexer rotates,", "rope_dim")
    if s.ple:
        at_least(1, "ple_heads")
        n_heads = 2 * s.ple_heads  # orders 2 and 3
        need(s.attn_every > 2, "attn_every", "makes layer 1 an attention layer, where PLE needs a linear one")
        need(s.n_embd % n_heads == 0, "n_embd", "is not a multiple of twice", "ple_heads")
        need(s.ple_vocab > n_heads, "ple_vocab", "is not above twice", "ple_heads")
        fits = n_heads * s.ple_vocab <= MAX_PLE_ROWS
        need(fits, "ple_vocab", "needs more rows than int32 can index at", "ple_heads")
