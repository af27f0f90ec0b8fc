"""The key-value section: what llama.cpp needs for graph and tokenizer, and the flags the model was made with."""

from __future__ import annotations

import gguf

from .blocks import generator_for
from .layers import PLE_LAYER
from .spec import ModelSpec
from .vocabulary import Vocabulary

FLAGS_KEY = "llama_phase.synth.flags"
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15}  # LLAMA_FTYPE_*
WINDOW = 128  # of gpt-oss
QWEN_ROPE_SECTIONS = [11, 11, 10, 0]  # of the released models, whose rope_dim is 64


def add_metadata(w: gguf.GGUFWriter, spec: ModelSpec, vocabulary: Vocabulary) -> None:
    w.add_string(FLAGS_KEY, spec.flags())
    w.add_type("model")
    w.add_name(f"synthetic {spec.arch} {spec.layers}x{spec.experts}")
    w.add_description("random weights, for tests only")
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_file_type(FILE_TYPES[spec.expert_types[0]])
    sizes = {
        "block_count": spec.blocks,
        "context_length": spec.ctx_train,
        "embedding_length": spec.n_embd,
        "feed_forward_length": spec.n_ff_exp * spec.experts_used,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.heads_kv,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "expert_count": spec.experts,
        "expert_used_count": spec.experts_used,
        "expert_feed_forward_length": spec.n_ff_exp,
    }
    if spec.is_hybrid:
        sizes |= {
            "rope.dimension_count": spec.rope_dim,
            "expert_shared_feed_forward_length": spec.n_ff_shexp,
            "ssm.conv_kernel": spec.conv_kernel,
            "ssm.state_size": spec.lin_dim,
            "ssm.group_count": spec.lin_heads_k,
            "ssm.time_step_rank": spec.lin_heads_v,
            "ssm.inner_size": spec.lin_heads_v * spec.lin_dim,
            "full_attention_interval": spec.attn_every,
        }
        if spec.has_mtp:
            sizes["nextn_predict_layers"] = 1
        w.add_rope_dimension_sections(_rope_sections(spec.rope_dim))
    if spec.arch == "gpt-oss":
        sizes["attention.sliding_window"] = WINDOW
    for key, value in sizes.items():
        w.add_uint32(f"{spec.arch}.{key}", value)
    w.add_float32(f"{spec.arch}.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32(f"{spec.arch}.rope.freq_base", 1e7)
    if spec.has_hyper_connections:
        _add_qwen4exp(w, spec)
        if spec.ple:
            _add_ple(w, spec, vocabulary)
    _add_tokenizer(w, vocabulary)


def _rope_sections(rope_dim: int) -> list[int]:
    """Interleaved M-RoPE: rotated pairs for time, height, width."""
    pairs = rope_dim // 2
    third = pairs // 3
    return QWEN_ROPE_SECTIONS if pairs == sum(QWEN_ROPE_SECTIONS) else [pairs - 2 * third, third, third, 0]


def _add_qwen4exp(w: gguf.GGUFWriter, spec: ModelSpec) -> None:
    recurrent = [spec.is_recurrent(layer) for layer in range(spec.blocks)]
    w.add_recurrent_layers(recurrent)
    w.add_hyper_connection_count(spec.hc)
    w.add_hyper_connection_low_rank(spec.hc_rank)
    w.add_uint32(f"{spec.arch}.attention.indexer.head_count", spec.idx_heads)
    w.add_uint32(f"{spec.arch}.attention.indexer.key_length", spec.idx_dim)
    w.add_uint32(f"{spec.arch}.attention.indexer.top_k", spec.idx_topk)
    w.add_attention_compress_ratios([0 if r else spec.idx_ratio for r in recurrent])


def _add_ple(w: gguf.GGUFWriter, spec: ModelSpec, vocabulary: Vocabulary) -> None:
    n_heads = 2 * spec.ple_heads
    hash_multipliers = generator_for(spec.seed, "ple").integers(1 << 40, 1 << 44, 3)
    w.add_ple_layers([PLE_LAYER])
    w.add_ple_ngram_size(3)
    w.add_ple_heads_per_ngram(spec.ple_heads)
    w.add_ple_conv_kernel(spec.conv_kernel)
    w.add_ple_eos_token_id(vocabulary.special_ids["eos_token_id"])
    w.add_uint32(f"{spec.arch}.embedding_length_per_layer_input", spec.n_embd // n_heads)
    w.add_ple_layer_multipliers([int(x) | 1 for x in hash_multipliers])
    w.add_ple_head_offsets([head * spec.ple_vocab for head in range(n_heads)])
    w.add_ple_head_vocab_sizes([spec.ple_vocab - head for head in range(n_heads)])


def _add_tokenizer(w: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(vocabulary.pre)
    w.add_token_list(vocabulary.tokens)
    w.add_token_types(vocabulary.types)
    w.add_token_merges(vocabulary.merges)
    for name, token in vocabulary.special_ids.items():
        w.add_uint32(f"tokenizer.ggml.{name}", token)
    w.add_add_bos_token(False)
    if vocabulary.chat_template:
        w.add_chat_template(vocabulary.chat_template)
