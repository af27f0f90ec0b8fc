"""Facts about a model, from the headers of all its shards: what each layer weighs, no decisions.

K/V and state are counted as the pinned llama.cpp allocates them, without the padding of devices. What this header
cannot tell is None, and ``ModelFacts.unknown`` says what and why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from llama_phase.gguf_header import LAYER, Header, check_model, tensor_bytes

# what --cpu-moe keeps in host memory (LLM_FFN_EXPS_REGEX of the pinned source)
_HOST_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
# what the engine copies into slots and ring
_SLOT_WEIGHTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.weight$")
# read by rows before the first layer, so llama.cpp leaves them in host memory
_INPUT = re.compile(r"^(token_embd|token_types|position_embd|per_layer_token_embd|per_layer_embd)")
# state laid out in another way than the ssm.* keys say
_OTHER_STATE = ("wkv.head_size", "shortconv.l_cache", "kda.head_dim")
_F32_BYTES = 4


@dataclass(frozen=True)
class LayerFacts:
    """One layer. `expert_tensor_bytes`: whole tensors, one per kind of expert weight.

    `kv_k`, `kv_v`: elements of K and V per token; `indexer_k`: of the indexer's keys; `state_bytes`: recurrent state
    of one sequence. None: unknown. `draft`: a plan has it in the draft's context.
    """

    index: int
    kind: str  # attention, recurrent, both, none
    mtp: bool
    dense_bytes: int
    host_extra_bytes: int = 0  # stays beside the experts but is no slot's
    expert_tensor_bytes: tuple[int, ...] = ()
    n_expert: int = 0
    kv_k: int | None = 0
    kv_v: int | None = 0
    indexer_k: int = 0
    state_bytes: int | None = 0
    draft: bool = False

    @property
    def experts_bytes(self) -> int:
        return sum(self.expert_tensor_bytes)

    @property
    def expert_bytes(self) -> int:
        """All weights of one expert."""
        return self.experts_bytes // self.n_expert if self.n_expert else 0


@dataclass(frozen=True)
class ModelFacts:
    """A model over all its shards. `input_bytes` stay in host memory, `output_bytes` go with the last device; `draft`:
    the model that drafts for it, when that is in another file."""

    path: Path
    architecture: str
    name: str
    n_shards: int
    file_bytes: int
    n_embd: int
    n_expert: int
    n_used: int
    context_length: int
    has_indexer: bool
    input_bytes: int
    output_bytes: int
    layers: tuple[LayerFacts, ...]
    unknown: dict[str, str] = field(default_factory=dict)
    draft: ModelFacts | None = None

    @property
    def served_layers(self) -> tuple[LayerFacts, ...]:
        """Without MTP layers, which are loaded for speculation only."""
        return tuple(layer for layer in self.layers if not layer.mtp)

    @property
    def moe_layers(self) -> tuple[LayerFacts, ...]:
        return tuple(layer for layer in self.served_layers if layer.expert_tensor_bytes)

    @property
    def experts_bytes(self) -> int:
        return sum(layer.experts_bytes for layer in self.moe_layers)


def read_facts(path: Path, draft: str | Path | None = None) -> ModelFacts:
    """Facts about the model whose (first) file is `path`, and of the file that drafts for it. Raises ModelError as
    `check_model` does."""
    facts = model_facts(check_model(path))
    return replace(facts, draft=model_facts(check_model(Path(draft), draft=True))) if draft else facts


def model_facts(headers: Sequence[Header]) -> ModelFacts:
    """The same from parsed headers, the first shard's first."""
    head = headers[0]
    tensors = {name: (dims, kind) for header in headers for name, (dims, kind, _) in header.tensors.items()}
    unknown: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, (dims, kind) in tensors.items():
        size = tensor_bytes(dims, kind)
        if size is None:
            unknown["weights"] = f"{name} is of ggml type {kind}, unknown here: it counts as empty"
        sizes[name] = size or 0

    n_all = head.number("block_count")
    n_trunk = n_all - head.number("nextn_predict_layers")
    by_layer: dict[int, dict[str, int]] = {}
    outside: dict[str, int] = {}
    for name, size in sizes.items():
        match = LAYER.match(name)
        if match:
            by_layer.setdefault(int(match[1]), {})[name] = size
        else:
            outside[name] = size
    shapes = {name: dims for name, (dims, _) in tensors.items()}
    layers = tuple(
        _layer(head, index, by_layer.get(index, {}), shapes, index >= n_trunk, unknown) for index in range(n_all)
    )
    input_bytes = sum(size for name, size in outside.items() if _INPUT.match(name))
    output_bytes = sum(outside.values()) - input_bytes
    if "output.weight" not in outside:  # tied: the table is on the device a second time
        output_bytes += outside.get("token_embd.weight", 0)
    if head.number("attention.sliding_window"):
        unknown["sliding window"] = "K/V is counted as if every layer kept the whole context: an upper bound"
    return ModelFacts(
        path=head.path,
        architecture=head.architecture,
        name=str(head.metadata.get("general.name") or head.path.stem),
        n_shards=len(headers),
        file_bytes=sum(header.file_bytes for header in headers),
        n_embd=head.number("embedding_length"),
        n_expert=head.number("expert_count"),
        n_used=_largest(head, "expert_used_count"),
        context_length=head.number("context_length"),
        has_indexer=head.number("attention.indexer.top_k") > 0 or any(layer.indexer_k for layer in layers),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        layers=layers,
        unknown=unknown,
    )


def _layer(
    head: Header,
    index: int,
    sizes: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
    mtp: bool,
    unknown: dict[str, str],
) -> LayerFacts:
    host = {name: size for name, size in sizes.items() if _HOST_EXPERTS.search(name)}
    slots = {name: size for name, size in host.items() if _SLOT_WEIGHTS.search(name)}
    tails = {name.split(".", 2)[2] for name in sizes}
    recurrent = any(tail.startswith(("ssm_", "time_mix_", "shortconv")) for tail in tails)
    attention = bool(tails & {"attn_k.weight", "attn_kv_a_mqa.weight"}) or (
        not recurrent and "attn_qkv.weight" in tails
    )
    kind = {(1, 1): "both", (1, 0): "attention", (0, 1): "recurrent", (0, 0): "none"}[attention, recurrent]
    kv_k, kv_v, indexer_k = _kv(head, index, unknown) if attention else (0, 0, 0)
    return LayerFacts(
        index=index,
        kind=kind,
        mtp=mtp,
        dense_bytes=sum(sizes.values()) - sum(host.values()),
        host_extra_bytes=sum(host.values()) - sum(slots.values()),
        expert_tensor_bytes=tuple(slots.values()),
        n_expert=max((prod(shapes[name][-1:]) for name in slots), default=0),
        kv_k=kv_k,
        kv_v=kv_v,
        indexer_k=indexer_k,
        state_bytes=_state(head, index, unknown) if recurrent else 0,
    )


def _kv(head: Header, index: int, unknown: dict[str, str]) -> tuple[int | None, int | None, int]:
    """Elements per token of K, V and the indexer's keys: of plain, MLA and qwen4exp attention."""
    indexer = head.number("attention.indexer.key_length")
    if (indexer or head.of_arch("attention.compress_ratios")) and head.architecture != "qwen4exp":
        unknown["kv"] = f"the cache of {head.architecture} is laid out in a way not known here: K/V is not counted"
        return None, None, 0
    heads = _of_layer(head, "attention.head_count", index)
    heads_kv = _of_layer(head, "attention.head_count_kv", index) or heads
    width = head.number("embedding_length") // heads if heads else 0
    k = head.number("attention.key_length", width)
    if head.number("attention.key_length_mla"):
        return k * heads_kv, 0, 0  # MLA: V is a part of K
    v = head.number("attention.value_length", width)
    if not (k and v and heads_kv):
        unknown["kv"] = "the header gives no head count or width: K/V is not counted"
        return None, None, 0
    pooled = bool(_of_layer(head, "attention.compress_ratios", index))
    return k * heads_kv, v * heads_kv, indexer * (2 if pooled else 1)


def _state(head: Header, index: int, unknown: dict[str, str]) -> int | None:
    """llama_hparams::n_embd_r and n_embd_s, F32, and the convolution of a PLE layer."""
    inner, state = head.number("ssm.inner_size"), head.number("ssm.state_size")
    if not (inner and state) or any(head.of_arch(key) for key in _OTHER_STATE):
        unknown["state"] = f"the recurrent state of {head.architecture} is not known here: it is not counted"
        return None
    conv = max(head.number("ssm.conv_kernel") - 1, 0) * (inner + 2 * head.number("ssm.group_count") * state)
    ple = 0
    layers = head.of_arch("ple.layers")
    if isinstance(layers, list) and index in layers:
        width = head.number("hyper_connection.count", 1) * head.number("embedding_length")
        ple = max(head.number("ple.conv_kernel") - 1, 0) * head.number("ple.ngram_size") * width
    return (conv + inner * state + ple) * _F32_BYTES


def _of_layer(head: Header, key: str, index: int) -> int:
    value = head.of_arch(key, 0)
    if isinstance(value, list):
        value = value[index] if index < len(value) else 0
    return max(value, 0) if isinstance(value, int) else 0


def _largest(head: Header, key: str) -> int:
    value = head.of_arch(key, 0)
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=0)
