"""Speculative decoding before anything is loaded: which flags llama-server gets, and what it would abort on. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from llama_phase.errors import ModelError, UsageError
from llama_phase.upstream_flags import (
    DRAFT_DEVICE,
    DRAFT_MODEL,
    DRAFT_N_MAX,
    DRAFT_REPO,
    SPEC_DEFAULT,
    SPEC_TYPE,
    flag_value,
    n_parallel,
    normalise,
    spec_types,
)

if TYPE_CHECKING:
    from llama_phase.gguf_header import Header
    from llama_phase.settings import Settings

MTP = "draft-mtp"
# Drafts that take the inputs of the target's layers, and the architecture of their file: another one has no list of
# layers to take, on which llama-server asserts or goes on without drafts.
READS_LAYERS = {"draft-eagle3": "eagle3", "draft-dflash": "dflash", "draft-dspark": "dflash"}
NEEDS_MODEL = ("draft-simple", *READS_LAYERS)
# ngram types: the flag with the length of their drafts, and what it is without
NGRAM_LENGTHS = {
    "ngram-simple": ("--spec-ngram-simple-size-m", 48),
    "ngram-map-k": ("--spec-ngram-map-k-size-m", 48),
    "ngram-map-k4v": ("--spec-ngram-map-k4v-size-m", 48),
    "ngram-mod": ("--spec-ngram-mod-n-max", 64),
    "ngram-cache": ("", 8),
}
TYPES = ("none", MTP, *NEEDS_MODEL, *NGRAM_LENGTHS)
UPSTREAM_N_MAX = 3  # default of --spec-draft-n-max
# Architectures whose graph gives its layers' inputs in the model's width; on others llama.cpp asserts.
LAYER_INPUTS = (
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama",
    "llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
)  # fmt: skip
ASSISTANT = "gemma4-assistant"  # a file that is nothing but an MTP block, of other tensors
# Architectures that have a graph for the MTP context: those that assert on more than one block, and the others.
MTP_OF_ONE_BLOCK = (
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "nemotron_h_moe",
    "qwen35", "qwen35moe", "qwen3next", "qwen4exp",
)  # fmt: skip
MTP_GRAPHS = (*MTP_OF_ONE_BLOCK, "hy_v3", "mimo2", "step35", ASSISTANT)
WIDENED = ("deepseek4", "qwen4exp")  # whose rows for the MTP block hold all hyper-connections
MTP_TENSOR = ".nextn.eh_proj."
ASSISTANT_TENSOR = ".nextn.pre_projection."


class _Choice(NamedTuple):
    """`types`: what llama-server will have, `ours`: those of them that it has to be told; `note`: why auto is off."""

    types: tuple[str, ...]
    ours: tuple[str, ...]
    wants_mtp: bool
    note: str


def has_mtp_block(headers: Sequence[Header]) -> bool:
    """Whether the model's files hold an MTP block, its weights included."""
    tensor = ASSISTANT_TENSOR if headers[0].architecture == ASSISTANT else MTP_TENSOR
    return headers[0].number("nextn_predict_layers") > 0 and any(
        tensor in name for header in headers for name in header.tensors
    )


def with_speculation(settings: Settings, target: Sequence[Header], draft: Sequence[Header] = ()) -> Settings:
    """The settings with `mtp`, `spec` and `draft_device` turned into flags of llama-server. Doing it twice changes
    nothing. `target` and `draft` are the headers of the two models' files.

    Raises UsageError for unknown types, for a type without its draft model and for combinations on which llama-server
    would abort; ModelError when MTP is asked for by a number or a type and there is no MTP block, or none that works.
    """
    choice = _choose(settings, target, draft)
    _check(settings, choice, target, draft)

    update: dict[str, object] = {}
    flags: list[str] = []
    if choice.ours:
        flags += [SPEC_TYPE[0], ",".join(choice.ours)]
        update["spec"] = ""
    if choice.wants_mtp and flag_value(settings.upstream, DRAFT_N_MAX) is None:
        flags += [DRAFT_N_MAX[0], str(settings.expert_batch - 1 if settings.mtp == "auto" else settings.mtp)]
    if choice.wants_mtp and settings.mtp == "auto" and settings.source("draft") == "default":
        update["draft"] = "auto"
    if settings.draft_device and flag_value(settings.upstream, DRAFT_DEVICE) is None:
        flags += [DRAFT_DEVICE[0], settings.draft_device]
    if flags:
        update["upstream"] = (*settings.upstream, *flags)
    return settings.model_copy(update=update) if update else settings


def notes(settings: Settings, target: Sequence[Header], draft: Sequence[Header] = ()) -> list[str]:
    """Sentences for somebody whose speculation works otherwise than it reads; `settings` are `with_speculation`'s."""
    choice = _choose(settings, target, draft)
    found = [choice.note] if choice.note else []
    if draft and not _of_a_model(choice.types):
        found.append(f"{draft[0].path} is loaded and drafts nothing: name its type, --spec TYPE, or drop -md")
    if (device := flag_value(settings.upstream, DRAFT_DEVICE)) and not _elsewhere(settings, draft):
        found.append(f"{DRAFT_DEVICE[0]} {device} has no effect: there is no draft model (-md)")
    if settings.expert_slots != 0 and settings.draft != "auto":
        found += _too_large(settings, choice)
    return found


def _choose(settings: Settings, target: Sequence[Header], draft: Sequence[Header]) -> _Choice:
    theirs = spec_types(settings.upstream)
    if theirs and settings.spec and theirs != settings.spec:
        raise UsageError(f"`--spec {settings.spec}` and `--spec-type {theirs}` differ", fix="keep one of them")
    types = _types(settings.spec if theirs is None else theirs)
    wants_mtp, note = settings.mtp != 0, ""
    if settings.mtp == "auto":
        own = draft or target
        wants_mtp = has_mtp_block(own) and settings.expert_batch > 1 and (theirs is None or MTP in types)
        wants_mtp = wants_mtp and not set(types) & set(NEEDS_MODEL)
        if wants_mtp and MTP not in types and (why := _why_no_mtp(own[0])):
            wants_mtp, note = False, f"--mtp auto: no drafts, {why}"
    if wants_mtp and MTP not in types:
        if theirs is not None:
            raise UsageError(
                f"`--mtp {settings.mtp}` and `--spec-type {theirs}` differ",
                fix=f"add {MTP} to the types, or drop --mtp",
            )
        types = [kind for kind in types if kind != "none"] + [MTP]
    ours = tuple(types) if theirs is None else ()
    more = ["ngram-mod"] if SPEC_DEFAULT in map(normalise, settings.upstream) else []
    if theirs is None and not types and not more and draft:
        more = _types_of_file(draft[0])
    return _Choice((*types, *more), ours, wants_mtp, note)


def _types(text: str) -> list[str]:
    types = [part.strip() for part in text.split(",") if part.strip()]
    for kind in types:
        if kind not in TYPES:
            near = difflib.get_close_matches(kind, TYPES, n=1, cutoff=0.0)[0]
            raise UsageError(
                f"there is no speculation type `{kind}`", fix=f"the nearest is `{near}`; all: {', '.join(TYPES)}"
            )
    return types


def _types_of_file(draft: Header) -> list[str]:
    """What llama-server makes of -md without types: common_speculative_types_from_gguf, which reads the first shard."""
    if draft.architecture == "dflash":
        return ["draft-dspark" if "markov_w1.weight" in draft.tensors else "draft-dflash"]
    last = draft.number("block_count") - 1
    return [MTP] if f"blk.{last}{MTP_TENSOR}weight" in draft.tensors else []


def _of_a_model(types: Sequence[str]) -> list[str]:
    return [kind for kind in dict.fromkeys(types) if kind == MTP or kind in NEEDS_MODEL]


def _elsewhere(settings: Settings, draft: Sequence[Header]) -> bool:
    """Whether the draft is a model of its own."""
    return bool(draft) or any(flag_value(settings.upstream, names) is not None for names in (DRAFT_MODEL, DRAFT_REPO))


def _why_no_mtp(header: Header) -> str:
    """Why the engine cannot draft with this file's MTP block; empty when it can."""
    architecture, blocks = header.architecture, header.number("nextn_predict_layers")
    if architecture not in MTP_GRAPHS:
        return f"llama.cpp has no graph for the MTP block of {architecture} ({header.path})"
    if architecture in MTP_OF_ONE_BLOCK and blocks > 1:
        return f"llama.cpp drafts with one MTP block of {architecture}, and {header.path} has {blocks}"
    return ""


def _check(settings: Settings, choice: _Choice, target: Sequence[Header], draft: Sequence[Header]) -> None:
    types = choice.types
    for kind in types:
        if kind in READS_LAYERS:
            _check_layer_inputs(kind, target[0], draft)
        if kind in NEEDS_MODEL and not _elsewhere(settings, draft):
            raise UsageError(f"{kind} needs a draft model", fix="give it after `--`: -md FILE")
    drafts = _of_a_model(types)
    if len(drafts) > 1:
        raise UsageError(
            f"{drafts[0]} and {drafts[1]} do not go together: llama-server has one draft model and one context for it",
            fix="keep one of them; ngram types go with either",
        )
    if MTP not in types:
        return
    if draft or not _elsewhere(settings, draft):
        _check_mtp(target, draft)
    if settings.draft_device and not _elsewhere(settings, draft):
        raise UsageError(
            f"--draft-device {settings.draft_device} has no effect: the MTP block is a part of {target[0].path}, and "
            "its layers are where the model's are",
            fix="drop it, or give the block's own file after `--`: -md FILE",
        )
    longest = _longest(settings, [MTP], choice.wants_mtp)
    if settings.expert_slots != 0 and longest >= settings.expert_batch:
        raise UsageError(
            f"drafts of {longest} tokens are verified {longest + 1} at a time, and slots serve "
            f"{settings.expert_batch} (LLAMA_PHASE_EXPERT_BATCH)",
            fix=f"draft at most {settings.expert_batch - 1}, or set LLAMA_PHASE_EXPERT_BATCH={longest + 1}",
        )


def _check_layer_inputs(kind: str, target: Header, draft: Sequence[Header]) -> None:
    if target.architecture not in LAYER_INPUTS:
        raise UsageError(
            f"{kind} does not work on {target.architecture} ({target.path}): the engine would abort, since its graph "
            "does not give the layers' inputs that the draft reads",
            fix=f"use {MTP}, or an ngram type",
        )
    if not draft:
        return
    own = draft[0]
    if own.architecture != READS_LAYERS[kind]:
        raise UsageError(
            f"{own.path} is a draft of {own.architecture}, and {kind} needs one of {READS_LAYERS[kind]}",
            fix="give the type that the draft is for, or another draft",
        )
    reads = own.number("target_hidden_size" if own.architecture == "eagle3" else "embedding_length")
    _check_widths(own, reads, target, target.number("embedding_length"))


def _check_mtp(target: Sequence[Header], draft: Sequence[Header]) -> None:
    own = draft or target
    if not has_mtp_block(own):
        raise ModelError(
            f"{own[0].path} has no MTP block to draft with",
            fix="drop --mtp, or give the block's own file after `--`: -md FILE"
            + (f"; {target[0].path} has one, so without -md it works" if draft and has_mtp_block(target) else ""),
        )
    if why := _why_no_mtp(own[0]):
        raise ModelError(why, fix=f"drop --mtp and {MTP}" + (" and -md" if draft else ""))
    if draft:
        _check_widths(own[0], _row_width(own[0]), target[0], _row_width(target[0]))


def _row_width(header: Header) -> int:
    """Width of the rows that an MTP block takes and gives (n_embd_out of llama.cpp); 0 when the file does not say."""
    width = header.number("embedding_length")
    if header.architecture in WIDENED:
        return width * header.number("hyper_connection.count", 1)
    return header.number("embedding_length_out") or width


def _check_widths(draft: Header, draft_width: int, target: Header, target_width: int) -> None:
    if draft_width and target_width and draft_width != target_width:
        raise ModelError(
            f"{draft.path} drafts from rows of {draft_width}, and those of {target.path} are {target_width} wide",
            fix="give the draft that was made for this model",
        )


def _longest(settings: Settings, types: Sequence[str], wants_mtp: bool) -> int:
    """Tokens of the longest draft of these types; 0 without any."""
    n_max = UPSTREAM_N_MAX
    if wants_mtp:
        n_max = settings.expert_batch - 1 if settings.mtp == "auto" else settings.mtp
    lengths = [0]
    for kind in types:
        flag, default = NGRAM_LENGTHS.get(kind) or (DRAFT_N_MAX[0], n_max if kind != "none" else 0)
        given = flag_value(settings.upstream, (flag,)) or ""
        lengths.append(int(given) if given.isdigit() and kind != "none" else default)
    return max(lengths)


def _too_large(settings: Settings, choice: _Choice) -> list[str]:
    """The sentence that says that verify batches can be larger than what slots serve."""
    sequences = n_parallel(settings.upstream)
    length, serve = _longest(settings, choice.types, choice.wants_mtp), settings.expert_batch
    total = sequences * (length + 1)
    if not length or total <= serve:
        return []
    remedies = ["set LLAMA_PHASE_DRAFT=auto" + (" (or --mtp auto)" if MTP in choice.types else "")]
    if serve > length:
        remedies.append(f"serve {serve // (length + 1)} at a time (-np {serve // (length + 1)})")
    if serve >= 2 * sequences:
        remedies.append(f"draft at most {serve // sequences - 1}")
    return [
        f"up to {total} tokens are verified at once (drafts of {length}, {sequences} sequences), and slots serve "
        f"{serve} (LLAMA_PHASE_EXPERT_BATCH): larger batches take the stock path; {', or '.join(remedies)}"
    ]
