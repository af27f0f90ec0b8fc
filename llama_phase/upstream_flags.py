"""The flags of llama-server that llama-phase has to understand when they come after ``--``; all others pass through."""

from __future__ import annotations

from itertools import pairwise

from llama_phase.errors import UsageError

UNDERSTOOD = {
    "model": ("-m", "--model"),
    "host": ("--host",),
    "port": ("--port",),
    "ctx": ("-c", "--ctx-size"),
    "batch": ("-b", "--batch-size"),
    "ubatch": ("-ub", "--ubatch-size"),
}
API_KEY_FILE = ("--api-key-file",)
API_PREFIX = ("--api-prefix",)
SLOT_SAVE_PATH = ("--slot-save-path",)
SSL_CERT = ("--ssl-cert-file",)
SSL_KEY = ("--ssl-key-file",)
CPU_MOE = ("-cmoe", "--cpu-moe")
N_CPU_MOE = ("-ncmoe", "--n-cpu-moe")
NGL = ("-ngl", "--gpu-layers", "--n-gpu-layers")
OVERRIDE = ("-ot", "--override-tensor")
DEVICE = ("-dev", "--device")
SPLIT_MODE = ("-sm", "--split-mode")
TENSOR_SPLIT = ("-ts", "--tensor-split")
DRAFT_MODEL = ("-md", "--model-draft", "--spec-draft-model")
DRAFT_REPO = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
DRAFT_DEVICE = ("--spec-draft-device", "-devd", "--device-draft")
DRAFT_N_MAX = ("--spec-draft-n-max",)
DRAFT_NGL = ("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft")
DRAFT_CPU_MOE = ("--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft")
DRAFT_N_CPU_MOE = ("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft")
DRAFT_OVERRIDE = ("--spec-draft-override-tensor", "-otd", "--override-tensor-draft")
DRAFT_TYPE_K = ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft")
DRAFT_TYPE_V = ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft")
SPEC_TYPE = ("--spec-type",)
SPEC_DEFAULT = "--spec-default"  # adds ngram-mod
PARALLEL = ("-np", "--parallel")
UPSTREAM_PARALLEL = 4  # its default, over one K/V
FLASH = ("-fa", "--flash-attn")
KV_OFFLOAD = ("-kvo", "--kv-offload")
NO_KV_OFFLOAD = ("-nkvo", "--no-kv-offload")
FALSE = ("off", "disabled", "false", "0")  # values of a flag or variable that llama-server reads as no
# Flags of its server that llama-phase reads, by the variable that llama-server takes for the flag.
FLAG_ENVIRONMENT = {
    "LLAMA_ARG_API_KEY_FILE": API_KEY_FILE,
    "LLAMA_ARG_API_PREFIX": API_PREFIX,
    "LLAMA_ARG_DEVICE": DEVICE,
    "LLAMA_ARG_N_PARALLEL": PARALLEL,
    "LLAMA_ARG_SPEC_DRAFT_HF_REPO": DRAFT_REPO,
    "LLAMA_ARG_SPEC_DRAFT_MODEL": DRAFT_MODEL,
    "LLAMA_ARG_SPEC_DRAFT_N_MAX": DRAFT_N_MAX,
    "LLAMA_ARG_SPEC_TYPE": SPEC_TYPE,
    "LLAMA_ARG_SPLIT_MODE": SPLIT_MODE,
    "LLAMA_ARG_SSL_CERT_FILE": SSL_CERT,
    "LLAMA_ARG_SSL_KEY_FILE": SSL_KEY,
    "LLAMA_ARG_TENSOR_SPLIT": TENSOR_SPLIT,
}
_KEY_SHOWN = ("it would show in the process list", "set LLAMA_PHASE_API_KEY, or pass --api-key-file FILE after `--`")
_FETCHED = ("the model is the file given to `serve`", "download it and give its path")
_ROUTER = ("one server serves one model here", "start one `llama-phase serve` per model")
REFUSED = {
    "--api-key": _KEY_SHOWN,
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"), _FETCHED),
    **dict.fromkeys(("--models-dir", "--models-preset"), _ROUTER),
}
_FIELD_OF = {flag: field for field, flags in UNDERSTOOD.items() for flag in flags}


def normalise(flag: str) -> str:
    """llama-server reads `--ubatch_size` as `--ubatch-size`; so do we."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def split_upstream(args: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Take out the flags that are settings of ours: ({setting: (flag, value)}, the rest in order).

    Raises UsageError for such a flag without a value, given twice with different values, written `--flag=value`
    (which llama-server does not read), and for flags that cannot work under a supervisor.
    """
    found: dict[str, tuple[str, str]] = {}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        flag = normalise(word)
        name, equals, value = flag.partition("=")
        if name in REFUSED:
            reason, fix = REFUSED[name]
            raise UsageError(f"`{name}` cannot be passed on: {reason}", fix=fix)
        if equals and name in _FIELD_OF:
            raise UsageError(f"llama-server does not read `{name}=...`", fix=f"write `{name} {value}`")
        field = _FIELD_OF.get(flag)
        if field is None:
            rest.append(word)
            continue
        value = next(words, None)
        if value is None:
            raise UsageError(f"`{flag}` after `--` has no value", fix=f"write `{flag} VALUE`")
        if field in found and found[field][1] != value:
            raise UsageError(
                f"{field} is given twice after `--`: `{found[field][0]} {found[field][1]}` and `{flag} {value}`",
                fix="keep one of them",
            )
        found[field] = (flag, value)
    return found, tuple(rest)


def flag_value(args: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """Value of the last occurrence of a flag, None when it is not there."""
    for index in range(len(args) - 2, -1, -1):
        if normalise(args[index]) in names:
            return args[index + 1]
    return None


def n_parallel(args: tuple[str, ...]) -> int:
    """Sequences that the server has, its own default without the flag."""
    given = flag_value(args, PARALLEL) or ""
    return int(given) if given.isdigit() else UPSTREAM_PARALLEL


def spec_types(args: tuple[str, ...]) -> str | None:
    """The types of all `--spec-type`, which llama-server adds up; None without any. A `none` empties its flag."""
    values = [value for word, value in pairwise(args) if normalise(word) in SPEC_TYPE]
    kept = ["none" if "none" in value.split(",") else value for value in values]
    return ",".join([value for value in kept if value != "none"] or kept[:1]) if kept else None
