"""The blocks of each architecture, as lists of tensors with the statistics that keep activations at rms 1.

qwen3moe    attention, MoE
gpt-oss     as qwen3moe, with biases, attention sinks and windows, without norms of queries and keys
qwen35moe   gated delta net or gated attention, MoE with a shared expert; MTP block
qwen4exp    as qwen35moe, with hyper-connections around each half, the QSA indexer in attention layers, and n-gram
            embeddings (PLE) on layer 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

from .blocks import Type, encode, generator_for
from .embeddings import add_embeddings
from .spec import ModelSpec
from .tensors import TensorList
from .vocabulary import Vocabulary

PLE_LAYER = 1
SWIGLU_RMS = 0.6  # rms of silu(a) * b for unit gaussians, and about that of silu(a)
MTP_BLOCK_RMS = 0.2  # what each half of the MTP block adds to its residual
EH_PROJ_ROWS = 512


def plan_model(spec: ModelSpec, vocabulary: Vocabulary) -> TensorList:
    """All tensors of the model, in file order."""
    plan = TensorList(spec)
    add_embeddings(plan, vocabulary.generable)
    if not spec.has_hyper_connections:
        plan.vector("output_norm.weight", spec.n_embd)
    elif spec.has_trunk:
        _hyper_connection(plan, "output_hc", inject=False)
    if spec.ple:
        n_heads = 2 * spec.ple_heads
        plan.ple_table("per_layer_token_embd.weight", spec.n_embd // n_heads, n_heads * spec.ple_vocab)
    if spec.has_trunk:
        for layer in range(spec.layers):
            _block(plan, layer, spec.block_output_rms)
            if spec.ple and layer == PLE_LAYER:
                _ngram_embeddings(plan, layer)
    if spec.has_mtp:
        _mtp_block(plan, spec.layers)
    return plan


def _block(plan: TensorList, layer: int, out_rms: float) -> None:
    spec, b = plan.spec, f"blk.{layer}"
    if spec.has_hyper_connections:
        _hyper_connection(plan, f"{b}.hc_attn")
        _hyper_connection(plan, f"{b}.hc_ffn")
    else:
        plan.vector(f"{b}.attn_norm.weight", spec.n_embd)
        plan.vector(f"{b}.{'ffn_norm' if spec.arch == 'qwen3moe' else 'post_attention_norm'}.weight", spec.n_embd)
    if spec.is_recurrent(layer):
        _gated_delta_net(plan, b, out_rms)
    else:
        _attention(plan, b, out_rms)
    _moe(plan, layer, out_rms)


def _hyper_connection(plan: TensorList, prefix: str, inject: bool = True) -> None:
    spec = plan.spec
    width = spec.hc * spec.n_embd
    plan.vector(f"{prefix}_norm.weight", width)
    # silu(down(x) / hc) has rms 0.6, and the gate before its sigmoid 0.8
    plan.matrix(f"{prefix}_down.weight", width, spec.hc_rank, spec.hc, 1.0)
    plan.matrix(f"{prefix}_up.weight", spec.hc_rank, width, 0.8, SWIGLU_RMS)
    if inject:
        plan.matrix(f"{prefix}_inject.weight", width, spec.hc, 0.5 * spec.hc, 1.0)


def _attention(plan: TensorList, b: str, out_rms: float) -> None:
    spec, x = plan.spec, plan.spec.block_input_rms
    q_width, kv_width = spec.heads * spec.head_dim, spec.heads_kv * spec.head_dim
    gated = spec.is_hybrid  # queries and output gates in one matrix
    q_rms = 2 if spec.has_biases else 1
    plan.matrix(f"{b}.attn_q.weight", spec.n_embd, q_width * (2 if gated else 1), q_rms, x)
    plan.matrix(f"{b}.attn_k.weight", spec.n_embd, kv_width, 1, x)
    plan.matrix(f"{b}.attn_v.weight", spec.n_embd, kv_width, 1, x)
    plan.matrix(f"{b}.attn_output.weight", q_width, spec.n_embd, out_rms, 0.3 if gated else 0.6)
    if spec.has_biases:
        for part, width in {"q": q_width, "k": kv_width, "v": kv_width, "output": spec.n_embd}.items():
            plan.vector(f"{b}.attn_{part}.bias", width, mean=0)
        plan.vector(f"{b}.attn_sinks.weight", spec.heads, mean=0, std=1)
    else:
        plan.vector(f"{b}.attn_q_norm.weight", spec.head_dim, mean=2.0)  # scores of std 2
        plan.vector(f"{b}.attn_k_norm.weight", spec.head_dim)
    if spec.has_hyper_connections:
        plan.matrix(f"{b}.indexer.q_proj.weight", spec.n_embd, spec.idx_heads * spec.idx_dim, 1, x)
        plan.matrix(f"{b}.indexer.k_proj.weight", spec.n_embd, spec.idx_dim, 1, x)
        plan.vector(f"{b}.indexer.q_norm.weight", spec.idx_dim)
        plan.vector(f"{b}.indexer.k_norm.weight", spec.idx_dim)


def _gated_delta_net(plan: TensorList, b: str, out_rms: float) -> None:
    spec, x = plan.spec, plan.spec.block_input_rms
    heads, v_width = spec.lin_heads_v, spec.lin_heads_v * spec.lin_dim
    qkv_width = 2 * spec.lin_heads_k * spec.lin_dim + v_width
    plan.matrix(f"{b}.attn_qkv.weight", spec.n_embd, qkv_width, 1, x)
    plan.matrix(f"{b}.attn_gate.weight", spec.n_embd, v_width, 1, x)
    plan.random(f"{b}.ssm_conv1d.weight", (spec.conv_kernel, qkv_width), 0.7, Type.F32)

    # decay exp(-A softplus(alpha + dt)), with A in [1, 16] and dt in [0.001, 0.1] as Mamba-2 starts them
    def inverse_softplus_dt(rng: np.random.Generator) -> np.ndarray:
        return np.log(np.expm1(np.exp(rng.uniform(math.log(1e-3), math.log(0.1), heads))))

    plan.values(f"{b}.ssm_dt.bias", heads, inverse_softplus_dt)
    plan.values(f"{b}.ssm_a", heads, lambda rng: -rng.uniform(1, 16, heads))
    plan.matrix(f"{b}.ssm_beta.weight", spec.n_embd, heads, 1, x, Type.F32)
    plan.matrix(f"{b}.ssm_alpha.weight", spec.n_embd, heads, 0.5, x, Type.F32)
    plan.vector(f"{b}.ssm_norm.weight", spec.lin_dim)
    plan.matrix(f"{b}.ssm_out.weight", v_width, spec.n_embd, out_rms, 0.55)


def _moe(plan: TensorList, layer: int, out_rms: float) -> None:
    spec, x, b = plan.spec, plan.spec.block_input_rms, f"blk.{layer}"
    _router(plan, f"{b}.ffn_gate_inp.weight")
    # the used experts weigh unevenly: the rms of their sum follows from the expected order statistics of the logits
    ranks = [(i + 0.625) / (spec.experts + 0.25) for i in range(spec.experts_used)]
    w = np.exp([-spec.router_std * NormalDist().inv_cdf(rank) for rank in ranks])
    effective_experts = w.sum() ** 2 / (w**2).sum()
    in_std = 1 / (x * math.sqrt(spec.n_embd))
    down_std = out_rms * math.sqrt(effective_experts) / (SWIGLU_RMS * math.sqrt(spec.n_ff_exp))
    plan.experts(f"{b}.ffn_gate_exps.weight", layer, spec.n_embd, spec.n_ff_exp, in_std)
    plan.experts(f"{b}.ffn_up_exps.weight", layer, spec.n_embd, spec.n_ff_exp, in_std)
    plan.experts(f"{b}.ffn_down_exps.weight", layer, spec.n_ff_exp, spec.n_embd, down_std)
    if spec.has_biases:
        plan.vector(f"{b}.ffn_gate_inp.bias", spec.experts, mean=0)
        for part, width in {"gate": spec.n_ff_exp, "up": spec.n_ff_exp, "down": spec.n_embd}.items():
            std = out_rms if part == "down" else 1
            plan.random(f"{b}.ffn_{part}_exps.bias", (width, spec.experts), std, Type.F32)
    if spec.is_hybrid:
        plan.random(f"{b}.ffn_gate_inp_shexp.weight", (spec.n_embd,), in_std, Type.F32)
        plan.matrix(f"{b}.ffn_gate_shexp.weight", spec.n_embd, spec.n_ff_shexp, 1, x)
        plan.matrix(f"{b}.ffn_up_shexp.weight", spec.n_embd, spec.n_ff_shexp, 1, x)
        plan.matrix(f"{b}.ffn_down_shexp.weight", spec.n_ff_shexp, spec.n_embd, out_rms, SWIGLU_RMS)


def _router(plan: TensorList, name: str) -> None:
    """[n_embd, experts]: logits of std router_std over all experts; ``skew`` makes some rows longer than others."""
    spec, x = plan.spec, plan.spec.block_input_rms

    def rows() -> Iterator[np.ndarray]:
        rng = generator_for(spec.seed, name)
        length = np.exp(spec.skew * rng.standard_normal((spec.experts, 1)))
        length *= spec.router_std / (x * math.sqrt(spec.n_embd) * math.sqrt((length**2).mean()))
        yield (rng.standard_normal((spec.experts, spec.n_embd)) * length).astype(np.float32)

    plan.add(name, (spec.n_embd, spec.experts), Type.F32, rows)


def _ngram_embeddings(plan: TensorList, layer: int) -> None:
    spec, b = plan.spec, f"blk.{layer}"
    width = spec.hc * spec.n_embd
    plan.matrix(f"{b}.ple_key.weight", spec.n_embd, width, 1, 1)
    plan.matrix(f"{b}.ple_value.weight", spec.n_embd, spec.n_embd, 3 * spec.block_output_rms, 1)
    for part in ("key", "query", "conv"):
        plan.vector(f"{b}.ple_norm_{part}.weight", width)
    plan.random(f"{b}.ple_conv1d.weight", (spec.conv_kernel, width), 0.1, Type.F32)


def _mtp_block(plan: TensorList, layer: int) -> None:
    """An attention block whose residual is the new token's embedding plus a bit of the trunk's hidden state."""
    spec, b = plan.spec, f"blk.{layer}"
    _block(plan, layer, MTP_BLOCK_RMS)
    _eh_proj(plan, f"{b}.nextn.eh_proj.weight")
    plan.vector(f"{b}.nextn.enorm.weight", spec.n_embd, std=0)
    if spec.has_hyper_connections:
        plan.vector(f"{b}.nextn.hnorm.weight", spec.hc * spec.n_embd, std=0)
        _hyper_connection(plan, f"{b}.nextn.hc_head", inject=False)
    else:
        plan.vector(f"{b}.nextn.hnorm.weight", spec.n_embd, std=0)
        plan.vector(f"{b}.nextn.shared_head_norm.weight", spec.n_embd)


def _eh_proj(plan: TensorList, name: str) -> None:
    """[2 n_embd, n_embd]: identity for the embedding half, weak noise for the hidden half."""
    spec, n = plan.spec, plan.spec.n_embd
    kind = Type.Q8_0 if plan.dense_type in (Type.Q4_0, Type.Q4_K) else plan.dense_type

    def rows() -> Iterator[np.ndarray]:
        rng = generator_for(spec.seed, name)
        for first in range(0, n, EH_PROJ_ROWS):
            count = min(EH_PROJ_ROWS, n - first)
            w = rng.standard_normal((count, 2 * n), dtype=np.float32) * np.float32(0.2 / math.sqrt(n))
            w[:, :n] = np.eye(count, n, first, dtype=np.float32)
            yield encode(kind, w)

    plan.add(name, (2 * n, n), kind, rows)
