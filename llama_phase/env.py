"""The environment as an interface: the registry of LLAMA_PHASE_* variables, its checks, and the child's environment.

The environment of this process is only read. What a server gets is built from scratch by ``child_environment``.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from llama_phase.errors import UsageError

if TYPE_CHECKING:
    from llama_phase.settings import Settings

PREFIX = "LLAMA_PHASE_"
TRUE_WORDS = frozenset({"1", "on", "true"})
FALSE_WORDS = frozenset({"0", "off", "false"})

# Upstream variables that llama.cpp tests with `getenv(...) != nullptr`: even `=0` switches them on, so a falsy value is
# left out of the child's environment. Not here: OpenCL's tuning variables, and those whose value upstream reads.
PRESENCE_MEANS_ON = frozenset(
    """
    GGML_BACKTRACE_LLDB GGML_CANN_NO_PINNED GGML_DISABLE_VULKAN GGML_NO_BACKTRACE GGML_REMOTING_USE_APIR_CAPSET
    GGML_RPC_DEBUG GGML_RPC_NO_RDMA GGML_SYCL_NO_PINNED LLAMA_TRACE
    GGML_CUDA_DISABLE_GRAPHS GGML_CUDA_ENABLE_UNIFIED_MEMORY GGML_CUDA_NO_PINNED GGML_CUDA_P2P GGML_CUDA_REGISTER_HOST
    GGML_VK_ALLOW_GRAPHICS_QUEUE GGML_VK_ALLOW_SYSMEM_FALLBACK GGML_VK_ASYNC_USE_TRANSFER_QUEUE GGML_VK_DEBUG_MARKERS
    GGML_VK_DISABLE_ASYNC GGML_VK_DISABLE_BFLOAT16 GGML_VK_DISABLE_COOPMAT GGML_VK_DISABLE_COOPMAT2
    GGML_VK_DISABLE_COOPMAT2_DECODE_VECTOR GGML_VK_DISABLE_DESCRIPTOR_REUSE GGML_VK_DISABLE_DOT2 GGML_VK_DISABLE_F16
    GGML_VK_DISABLE_FUSION GGML_VK_DISABLE_GRAPH_OPTIMIZE GGML_VK_DISABLE_HOST_VISIBLE_VIDMEM
    GGML_VK_DISABLE_INTEGER_DOT_PRODUCT GGML_VK_DISABLE_MMVQ GGML_VK_DISABLE_MULTI_ADD GGML_VK_DISABLE_OCP_FP4
    GGML_VK_ENABLE_MEMORY_PRIORITY GGML_VK_FA_SPARSE_DISABLE GGML_VK_FORCE_MMVQ GGML_VK_MEMORY_LOGGER
    GGML_VK_PERF_LOGGER GGML_VK_PERF_LOGGER_CONCURRENT GGML_VK_PREFER_HOST_MEMORY GGML_VK_SERIALIZE_SUBMISSIONS
    GGML_VK_SYNC_LOGGER
    """.split()  # noqa: SIM905
)
# Flags of `serve` that are named otherwise than the setting they give.
FLAG_NAMES = {"slots": "expert_slots", "grace": "grace_s"}
SHOWN_CHARS = 80  # of a value that is refused
_INT_DIGITS = 20  # more than any number here has
# Of the service manager to its service, which is the supervisor.
SERVICE_VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"})
UPSTREAM_PREFIXES = ("LLAMA_", "GGML_")
# An empty device list is a value: no device at all.
EMPTY_IS_A_VALUE = frozenset({"GGML_VK_VISIBLE_DEVICES"})


@dataclass(frozen=True)
class Variable:
    """One row of env.toml."""

    name: str
    scope: str
    kind: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    min: int = 0
    max: int = 0
    secret: bool = False

    @property
    def field(self) -> str:
        """Name of the setting it feeds."""
        return self.name.removeprefix(PREFIX).lower()

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        if self.kind == "choice":
            return ", ".join(self.choices)
        if self.kind in ("int", "int_or_auto"):
            return ("auto or " if self.kind == "int_or_auto" else "") + f"{self.min} to {self.max}"
        if self.kind == "int_list":
            return f"{self.min} to {self.max}, or several separated by commas"
        return "0/1, on/off, true/false" if self.kind == "bool" else "text"

    def check(self, text: str, *, shown: str = "") -> None:
        """Raise UsageError, which names `shown` (default: the variable), unless `text` is an accepted value.

        Empty is unset, so it passes.
        """
        if not text or self.kind == "text":
            return
        if self.kind == "choice":
            good = text in self.choices
        elif self.kind == "bool":
            good = text in TRUE_WORDS | FALSE_WORDS
        elif self.kind == "int_list":
            good = all(self._in_range(item) for item in text.split(","))
        else:
            good = self._in_range(text) or (self.kind == "int_or_auto" and text == "auto")
        if not good:
            value = (
                "a value"
                if self.secret
                else repr(text)
                if len(text) <= SHOWN_CHARS
                else repr(text[:SHOWN_CHARS]) + "..."
            )
            where = shown or self.name
            raise UsageError(f"{where} does not accept {value}", fix=f"set it to {self.accepted}, or unset it")

    def _in_range(self, text: str) -> bool:
        return text.isascii() and text.isdigit() and len(text) <= _INT_DIGITS and self.min <= int(text) <= self.max


@lru_cache(maxsize=1)
def registry() -> dict[str, Variable]:
    """All LLAMA_PHASE_* variables by name, in the order of env.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    rows = tomllib.loads(resources.files("llama_phase").joinpath("env.toml").read_text(encoding="utf-8"))["variable"]
    known = Variable.__dataclass_fields__
    variables = [
        Variable(**{key: tuple(value) if key == "choices" else value for key, value in row.items() if key in known})
        for row in rows
    ]
    return {variable.name: variable for variable in variables}


def parse_bool(text: str) -> bool | None:
    """True, False, or None for an empty text. Raises ValueError for anything but 0/1, on/off, true/false."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    if not word:
        return None
    raise ValueError(f"{text!r} is none of 0/1, on/off, true/false")


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The name of `known` that `name` probably means: a flag's setting, else the one spelt most like it."""
    known = list(known)
    meant = FLAG_NAMES.get(name.removeprefix(prefix).lower(), "")
    meant = prefix + (meant.upper() if prefix else meant)
    return meant if meant in known else difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def scan(base: Mapping[str, str] | None = None) -> None:
    """Raise UsageError for the first unknown or malformed LLAMA_PHASE_* variable of `base` (default: this process)."""
    base = os.environ if base is None else base
    for name in sorted(base):
        if not name.upper().startswith(PREFIX):
            continue
        variable = registry().get(name)
        if variable is None:
            near = nearest(name.upper(), registry(), prefix=PREFIX)
            raise UsageError(
                f"{name} is not a variable of llama-phase",
                fix=f"the nearest is {near} ({registry()[near].accepted}); `llama-phase env` lists all",
            )
        variable.check(base[name])


def child_environment(settings: Settings, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a server is started with; `base` (default: this process's) is not changed.

    `base` without LLAMA_PHASE_* and without upstream variables that are empty, that are falsy where presence alone
    switches them on, or that a flag of ours replaces; plus the engine's variables that differ from their default.
    With PREFILL_MODE off and nothing else set none of the engine's is passed, so the engine is stock.
    """
    base = os.environ if base is None else base
    child = {name: value for name, value in base.items() if not left_out(name, value)}
    child.update(engine_variables(settings, base))
    if settings.api_key is not None:
        # readable by the same user only, unlike argv; nothing to remove after a kill, unlike a file
        child["LLAMA_API_KEY"] = settings.api_key.get_secret_value()
    return child


def left_out(name: str, value: str) -> str:
    """Why a variable of ours is not handed on to the server; empty when it is."""
    from llama_phase.settings import UPSTREAM_ENVIRONMENT
    from llama_phase.upstream_flags import FLAG_ENVIRONMENT

    if name.upper().startswith(PREFIX):
        return "read by llama-phase, handed on only where it is the engine's and not the default"
    if name in UPSTREAM_ENVIRONMENT.values() or name in FLAG_ENVIRONMENT:
        return "handed on as a flag"
    if name in SERVICE_VARIABLES:
        return "meant for the supervisor"
    if not name.startswith(UPSTREAM_PREFIXES):
        return ""
    if not value and name not in EMPTY_IS_A_VALUE:
        return "empty, so unset"
    presence = name in PRESENCE_MEANS_ON or name.startswith("LLAMA_ARG_NO_")
    if presence and value.strip().lower() in FALSE_WORDS:
        return "off, and llama.cpp takes its mere presence for on"
    return ""


def engine_variables(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The LLAMA_PHASE_* variables the engine is given: settings first, then what `base` and the files say of others."""
    chosen: dict[str, str] = {}
    for variable in registry().values():
        if variable.scope != "engine":
            continue
        other = base.get(variable.name) or settings.from_file(variable.field)
        value = str(getattr(settings, variable.field, other))
        if value and value != variable.default:
            chosen[variable.name] = value
    return chosen


def describe(base: Mapping[str, str] | None = None, files: Iterable[Path] = ()) -> list[dict[str, object]]:
    """One row per variable for `llama-phase env`: name, scope, meaning, accepted, default, value, source.

    `value` is what `llama-phase serve` would use with these configuration files; secrets are shown as `(set)`.
    """
    from llama_phase.config_file import read_files
    from llama_phase.settings import UPSTREAM_ENVIRONMENT, Settings

    base = os.environ if base is None else base
    in_files = read_files(files, Settings.model_fields)
    rows: list[dict[str, object]] = []
    for variable in registry().values():
        text = base.get(variable.name, "")
        if text:
            value, source = text, "environment"
        elif base.get(upstream := UPSTREAM_ENVIRONMENT.get(variable.field, "")):
            value, source = base[upstream], f"environment {upstream}"
        elif variable.field in in_files:
            value, source = str(in_files[variable.field].value), in_files[variable.field].source
        else:
            field = Settings.model_fields.get(variable.field)
            default = variable.default if field is None or field.is_required() else field.default
            value, source = "" if default is None else str(default), "default"
        if variable.secret and value:
            value = "(set)"
        rows.append(
            {
                "name": variable.name,
                "scope": variable.scope,
                "meaning": variable.meaning,
                "accepted": variable.accepted,
                "default": variable.default,
                "value": value,
                "source": source,
            }
        )
    return rows
