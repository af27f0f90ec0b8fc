"""Speculative decoding before anything is loaded: which flags llama-server gets, and what it would abort on. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llama_phase.errors import ModelError, UsageError
from llama_phase.upstream_flags import DRAFT_DEVICE, DRAFT_MODEL, DRAFT_N_MAX, DRAFT_REPO, SPEC_TYPE, flag_value

if TYPE_CHECKING:
    from llama_phase.gguf_header import Header
    from llama_phase.settings import Settings

MTP = "draft-mtp"
READS_LAYERS = ("draft-eagle3", "draft-dflash", "draft-dspark")  # drafts that take the inputs of the target's layers
NEEDS_MODEL = ("draft-simple", *READS_LAYERS)
TYPES = (
    "none", MTP, *NEEDS_MODEL, "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
# Architectures whose graph gives no layer input of the model's width; llama.cpp asserts at the first decode.
NO_LAYER_INPUTS = ("glm5-next", "kimi-k3", "qwen4exp")
MTP_TENSOR = ".nextn.eh_proj."


def has_mtp_block(headers: Sequence[Header]) -> bool:
    """Whether the model's files hold an MTP block, its weights included."""
    return headers[0].number("nextn_predict_layers") > 0 and any(
        MTP_TENSOR in name for header in headers for name in header.tensors
    )


def with_speculation(settings: Settings, target: Sequence[Header], draft: Sequence[Header] = ()) -> Settings:
    """The settings with `mtp`, `spec` and `draft_device` turned into flags of llama-server. Doing it twice changes
    nothing. `target` and `draft` are the headers of the two models' files.

    Raises UsageError for unknown types, for a type without its draft model and for combinations on which llama-server
    would abort; ModelError when MTP is asked for by a number and there is no MTP block.
    """
    theirs = flag_value(settings.upstream, SPEC_TYPE)
    if theirs and settings.spec and theirs != settings.spec:
        raise UsageError(f"`--spec {settings.spec}` and `--spec-type {theirs}` differ", fix="keep one of them")
    types = _types(theirs or settings.spec)
    elsewhere = bool(draft) or flag_value(settings.upstream, DRAFT_REPO) is not None
    wants_mtp = settings.mtp != 0
    if settings.mtp == "auto":
        wants_mtp = has_mtp_block(draft or target) and settings.expert_batch > 1 and (theirs is None or MTP in types)
    if wants_mtp and MTP not in types:
        if theirs is not None:
            raise UsageError(
                f"`--mtp {settings.mtp}` and `--spec-type {theirs}` differ",
                fix=f"add {MTP} to the types, or drop --mtp",
            )
        types = [kind for kind in types if kind != "none"] + [MTP]
    if MTP in types and not elsewhere and target[0].number("nextn_predict_layers") == 0:
        raise ModelError(
            f"{target[0].path} has no MTP block to draft with",
            fix="drop --mtp, or give the block's own file after `--`: -md FILE",
        )
    _check(settings, types, target[0], elsewhere)

    update: dict[str, object] = {}
    flags: list[str] = []
    if types and theirs is None:
        flags += [SPEC_TYPE[0], ",".join(types)]
        update["spec"] = ""
    if wants_mtp and flag_value(settings.upstream, DRAFT_N_MAX) is None:
        flags += [DRAFT_N_MAX[0], str(settings.expert_batch - 1 if settings.mtp == "auto" else settings.mtp)]
    if wants_mtp and settings.mtp == "auto" and settings.source("draft") == "default":
        update["draft"] = "auto"
    if settings.draft_device and flag_value(settings.upstream, DRAFT_DEVICE) is None:
        flags += [DRAFT_DEVICE[0], settings.draft_device]
    if flags:
        update["upstream"] = (*settings.upstream, *flags)
    return settings.model_copy(update=update) if update else settings


def _types(text: str | None) -> list[str]:
    types = [part.strip() for part in (text or "").split(",") if part.strip()]
    for kind in types:
        if kind not in TYPES:
            near = difflib.get_close_matches(kind, TYPES, n=1, cutoff=0.0)[0]
            raise UsageError(
                f"there is no speculation type `{kind}`", fix=f"the nearest is `{near}`; all: {', '.join(TYPES)}"
            )
    return types


def _check(settings: Settings, types: Sequence[str], target: Header, has_draft: bool) -> None:
    given = has_draft or flag_value(settings.upstream, DRAFT_MODEL) is not None
    for kind in types:
        if kind in READS_LAYERS and target.architecture in NO_LAYER_INPUTS:
            raise UsageError(
                f"{kind} does not work on {target.architecture} ({target.path}): the engine would abort at the first "
                "token, since the layers' inputs are not of the width that the draft reads",
                fix=f"use {MTP}, or an ngram type",
            )
        if kind in NEEDS_MODEL and not given:
            raise UsageError(f"{kind} needs a draft model", fix="give it after `--`: -md FILE")
    length = flag_value(settings.upstream, DRAFT_N_MAX)
    longest = int(length) if length and length.isdigit() else settings.mtp
    if MTP in types and settings.expert_slots != 0 and isinstance(longest, int) and longest >= settings.expert_batch:
        raise UsageError(
            f"drafts of {longest} tokens are verified {longest + 1} at a time, and slots serve "
            f"{settings.expert_batch} (LLAMA_PHASE_EXPERT_BATCH)",
            fix=f"draft at most {settings.expert_batch - 1}, or set LLAMA_PHASE_EXPERT_BATCH={longest + 1}",
        )
