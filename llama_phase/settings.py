"""Every option of `llama-phase serve`: one frozen object, each value of which knows where it came from.

Precedence: flags (ours, or upstream's after ``--``) > LLAMA_PHASE_* > the LLAMA_ARG_* variable of the same meaning >
the files given (see config_file) > default. A flag given twice with different values is refused, never resolved by
order. Flags of llama-server in a file that are no settings come before those after ``--``: the last one counts there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from llama_phase.address import check_api_key, check_hosts, plain_hosts, read_api_key
from llama_phase.config_file import PATHS, READ_NONE, Value, expanded, read_files
from llama_phase.env import FLAG_NAMES, PREFIX, nearest, registry, scan
from llama_phase.errors import UsageError
from llama_phase.plan_ubatch import UBATCHES
from llama_phase.upstream_flags import (
    API_KEY_FILE,
    API_PREFIX,
    FALSE,
    FLAG_ENVIRONMENT,
    KV_OFFLOAD,
    NO_KV_OFFLOAD,
    SLOT_SAVE_PATH,
    SSL_CERT,
    flag_value,
    normalise,
    split_upstream,
)

# Variables of llama-server that mean the same as a setting of ours. They are read here and kept from the child, to
# which the setting goes as a flag.
UPSTREAM_ENVIRONMENT = {
    "model": "LLAMA_ARG_MODEL",
    "host": "LLAMA_ARG_HOST",
    "port": "LLAMA_ARG_PORT",
    "ctx": "LLAMA_ARG_CTX_SIZE",
    "batch": "LLAMA_ARG_BATCH",
    "ubatch": "LLAMA_ARG_UBATCH",
    "api_key": "LLAMA_API_KEY",
}
UPSTREAM_BATCH = 2048  # llama-server's own default of -b, in tokens
_INT_MAX = 2**31 - 1
_FLAG_OF = {setting: flag for flag, setting in FLAG_NAMES.items()}


def _off_is_zero(value: Any) -> Any:
    return 0 if value == "off" else value


class Settings(BaseSettings):
    """Options of one server. Build it with ``Settings.load``; invalid values raise UsageError there."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    model: Path
    host: Annotated[str, AfterValidator(plain_hosts)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    ctx: Annotated[int, Field(ge=0, le=_INT_MAX)] | None = None
    ubatch: Annotated[int, Field(ge=1, le=65536)] = 512
    batch: Annotated[int, Field(ge=1, le=_INT_MAX)] | None = None
    prefill_mode: Literal["off", "transaction", "bypass"] = "transaction"
    prefill_ubatch: Literal["auto"] | Annotated[int, Field(ge=1, le=65536)] = 2048
    prefill_min_tokens: Literal["auto"] | Annotated[int, Field(ge=1, le=2**30)] = "auto"
    expert_slots: Literal["auto"] | Annotated[int, Field(ge=0, le=65536)] = 0
    draft_slots: Literal["auto"] | Annotated[int, Field(ge=1, le=65536)] = "auto"
    expert_batch: Annotated[int, Field(ge=1, le=64)] = 8
    ring: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    chunk: Literal["auto"] | Annotated[int, Field(ge=0, le=65536)] = 0
    restore: Literal["snapshot", "cold", "prompt"] = "cold"
    refill_mib: Annotated[int, Field(ge=0, le=16777216)] = 256
    kv: Literal["device", "host", "auto", "host-all"] = "device"
    kv_rows: Literal["auto"] | Annotated[int, Field(ge=0, le=16777216)] = "auto"
    select: Literal["auto", "stock", "fast"] = "auto"
    draft: Literal["off", "auto"] = "off"
    mtp: Annotated[Literal["auto"] | Annotated[int, Field(ge=0, le=63)], BeforeValidator(_off_is_zero)] = 0
    graphs: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    spec: str = ""
    draft_device: str = ""
    budget_mib: str = ""
    fault: str = ""
    log: Literal["quiet", "info", "debug"] = "info"
    api_key: SecretStr | None = None
    grace_s: Annotated[int, Field(ge=0, le=3600)] = 10
    stall_s: Annotated[int, Field(ge=1, le=86400)] = 300
    restarts: Annotated[int, Field(ge=0, le=1000)] = 5
    rollback: bool = True
    state_dir: Path | None = None
    keep_conversations: bool = False
    conversations_every_s: Annotated[int, Field(ge=0, le=86400)] = 300
    check_plan: bool = True
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    server_binary: Path | None = None
    upstream: tuple[str, ...] = ()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _others: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls,
        *,
        upstream: tuple[str, ...] | list[str] = (),
        files: Iterable[Path] = (),
        model_needed: bool = True,
        of_server: bool = True,
        **flags: Any,
    ) -> Settings:
        """Merge flags (None: not given), upstream's flags, environment, files (strongest first) and defaults.

        Without `model_needed` a model that nobody names is an empty path. Without `of_server` it is for an engine in
        this process: what is given are keywords, and the variables of FLAG_ENVIRONMENT mean nothing.

        Raises UsageError for an unknown keyword or variable (with the nearest name), an invalid value, a value given
        twice, and a logical batch smaller than the prefill micro-batch.
        """
        scan()
        given = {name: value for name, value in flags.items() if value is not None}
        for name in given:
            if name not in cls.model_fields:
                near = nearest(name, cls.model_fields)
                raise UsageError(f"there is no setting `{name}`", fix=f"the nearest is `{near}`")
        sources = dict.fromkeys(given, "flag" if of_server else "keyword")
        theirs, rest = split_upstream(tuple(upstream))
        for name, (flag, text) in theirs.items():
            if name in given and str(given[name]) != text:
                raise UsageError(
                    f"{name} is given twice: {given[name]} to llama-phase and `{flag} {text}` after `--`",
                    fix="keep one of them",
                )
            given[name] = text
            sources[name] = f"upstream flag {flag}"
        in_files = read_files(files, cls.model_fields)
        if "upstream" in in_files:
            words, sources["upstream"] = in_files.pop("upstream")
            if rest:
                sources["upstream"] += ", then upstream flags"
            rest = (*words, *rest)
        elif rest:
            sources["upstream"] = "upstream flags"
        for variable, names in FLAG_ENVIRONMENT.items() if of_server else ():
            if os.environ.get(variable) and flag_value(rest, names) is None:
                rest = (names[0], os.environ[variable], *rest)
                sources["upstream"] = ", then ".join(filter(None, [f"environment {variable}", sources.get("upstream")]))
        for name in cls.model_fields:
            if name in given:
                continue
            other = UPSTREAM_ENVIRONMENT.get(name, "")
            if os.environ.get(PREFIX + name.upper()):
                sources[name] = f"environment {PREFIX}{name.upper()}"
            elif os.environ.get(other):
                given[name] = os.environ[other]
                sources[name] = f"environment {other}"
            elif name in in_files:
                given[name], sources[name] = in_files[name]
        if not model_needed and "model" not in sources:
            given["model"] = Path()
        try:
            return cls._of(given | {"upstream": rest}, sources, in_files)
        except UsageError as error:
            if "(file " not in str(error):
                raise
            # `down` and `status` must remain possible
            raise UsageError(str(error), fix=f"{error.fix}; to read no file: {READ_NONE}") from None

    @classmethod
    def _of(cls, given: dict[str, Any], sources: dict[str, str], in_files: dict[str, Value]) -> Settings:
        try:
            settings = cls(**given)
        except ValidationError as error:
            raise _usage_error(error, sources) from None
        at_home = {name: path for name in PATHS if str(path := getattr(settings, name)).startswith("~")}
        if at_home:
            paths = {name: expanded(path, f"{name} ({sources.get(name)})") for name, path in at_home.items()}
            settings = settings.model_copy(update=paths)
        settings._sources.update(sources)
        settings._others.update((k, str(v.value)) for k, v in in_files.items() if k not in cls.model_fields)
        settings._check()
        return settings

    def source(self, name: str) -> str:
        """Where the value of a setting came from: flag, upstream flag -b, environment NAME, file PATH, or default."""
        return self._sources.get(name, "default")

    def from_file(self, name: str) -> str:
        """What the files say of an engine variable that is no setting here; empty when nothing."""
        return self._others.get(name, "")

    def _check(self) -> None:
        self._check_batches()
        self._check_hosts()
        self._check_ports()
        self._check_kv()
        if self.api_key is not None:
            check_api_key(self.probe_key or "", f"api_key ({self.source('api_key')})")

    def _check_batches(self) -> None:
        auto = self.prefill_ubatch == "auto"  # the batch is its limit
        if self.prefill_mode == "off" or self.batch is None or auto or self.batch >= self.largest_prefill_ubatch:
            return
        raise UsageError(
            f"batch {self.batch} ({self.source('batch')}) is smaller than prefill_ubatch {self.prefill_ubatch} "
            f"({self.source('prefill_ubatch')})",
            fix=f"drop the batch (-b) or make it at least {self.prefill_ubatch}, or lower LLAMA_PHASE_PREFILL_UBATCH",
        )

    def _check_hosts(self) -> None:
        if not self.tcp_hosts:
            raise UsageError(
                f"host {self.host!r} names no TCP address, which the supervisor needs to watch its server",
                fix="add one, for example --host 127.0.0.1",
            )
        check_hosts(self.tcp_hosts, self.source("host"))

    def _check_ports(self) -> None:
        if self.metrics_port and self.metrics_port == self.port:
            raise UsageError(
                f"port {self.port} is meant for the server ({self.source('port')}) and for the metrics "
                f"({self.source('metrics_port')})",
                fix="choose another --metrics-port, or --port",
            )

    def _check_kv(self) -> None:
        """Flags that llama.cpp obeys before it asks where a layer's K/V goes."""
        if self.kv == "device":
            return
        given = [word for word in self.upstream if normalise(word) in (*KV_OFFLOAD, *NO_KV_OFFLOAD)]
        if given and normalise(given[-1]) in NO_KV_OFFLOAD:
            what, drop = f"`{given[-1]}` ({self.source('upstream')})", given[-1]
        elif not given and (variable := _no_kv_offload(os.environ)):
            what, drop = f"{variable} (environment)", variable
        else:
            return
        raise UsageError(
            f"{what} takes all K/V and its attention to the CPU, so that kv {self.kv} ({self.source('kv')}) would mean "
            "nothing",
            fix=f"drop {drop}, and the GPU reads K/V in host memory; or set LLAMA_PHASE_KV=device",
        )

    @property
    def tcp_hosts(self) -> list[str]:
        """The addresses to listen on, without UNIX sockets."""
        hosts = [host.strip() for host in self.host.split(",")]
        return [host for host in hosts if host and not host.endswith(".sock")]

    @property
    def effective_batch(self) -> int | None:
        """Logical batch in tokens that the server gets; None leaves it to llama-server."""
        if self.batch is not None or self.prefill_mode == "off":
            return self.batch
        return max(UPSTREAM_BATCH, self.largest_prefill_ubatch)

    @property
    def largest_prefill_ubatch(self) -> int:
        """Micro-batch of the prefill phase in tokens, at most: the engine chooses when it is `auto`."""
        return UBATCHES[-1] if self.prefill_ubatch == "auto" else self.prefill_ubatch

    @property
    def base_url(self) -> str:
        """URL of the server as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.tcp_hosts[0], self.tcp_hosts[0])
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if flag_value(self.upstream, SSL_CERT) else "http"
        return f"{scheme}://{host}:{self.port}{flag_value(self.upstream, API_PREFIX) or ''}"

    @property
    def probe_key(self) -> str | None:
        """The API key for our own requests: the first of those the server accepts. Never print it."""
        if self.api_key is not None:
            return self.api_key.get_secret_value().split(",")[0]
        path = flag_value(self.upstream, API_KEY_FILE)
        return read_api_key(Path(path)) if path else None

    @property
    def state_path(self) -> Path:
        """Folder for logs and the record of running servers."""
        if self.state_dir is not None:
            return expanded(self.state_dir, f"state_dir ({self.source('state_dir')})")
        from platformdirs import user_state_path

        return user_state_path("llama-phase", appauthor=False)

    @property
    def conversations_path(self) -> Path:
        """Folder for the saved state of the server's slots."""
        given = flag_value(self.upstream, SLOT_SAVE_PATH)
        return Path(given) if given else self.state_path / "conversations" / f"port{self.port}"


def _no_kv_offload(environment: Mapping[str, str]) -> str:
    """The variable that is -nkvo for llama-server; empty when none is set so."""
    if "LLAMA_ARG_NO_KV_OFFLOAD" in environment:  # with any value
        return "LLAMA_ARG_NO_KV_OFFLOAD"
    return "LLAMA_ARG_KV_OFFLOAD" if environment.get("LLAMA_ARG_KV_OFFLOAD") in FALSE else ""


def argv(settings: Settings) -> list[str]:
    """The flags of llama-server for these settings, without the program. Holds no API key."""
    flags = ["-m", str(settings.model), "--host", settings.host, "--port", str(settings.port)]
    flags += ["-ub", str(settings.ubatch)]
    if settings.effective_batch is not None:
        flags += ["-b", str(settings.effective_batch)]
    if settings.ctx is not None:
        flags += ["-c", str(settings.ctx)]
    if "--metrics" not in settings.upstream:
        flags.append("--metrics")
    if settings.keep_conversations and flag_value(settings.upstream, SLOT_SAVE_PATH) is None:
        flags += ["--slot-save-path", str(settings.conversations_path)]
    if settings.expert_slots != 0 and not {"--no-repack", "-nr"} & set(settings.upstream):
        flags.append("--no-repack")  # slots are copied from the file's own layout
    return flags + list(settings.upstream)


def _usage_error(error: ValidationError, sources: dict[str, str]) -> UsageError:
    """The first problem of a validation as one sentence, without the value (it may be a secret)."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "a setting"
    if first["type"] == "missing":
        return UsageError(f"{name} is not given", fix=f"name it on the command line, or set {PREFIX}{name.upper()}")
    where = sources.get(name, "default")
    if where == "flag":
        where = f"flag --{_FLAG_OF.get(name, name).replace('_', '-')}"
    variable = registry().get(PREFIX + name.upper())
    if variable is not None and variable.kind != "text":
        # of several types pydantic names the first only
        return UsageError(f"{name} ({where}) is wrong", fix=f"give {variable.accepted}")
    wanted = first["msg"][:1].lower() + first["msg"][1:]
    return UsageError(f"{name} ({where}) is wrong: {wanted}", fix="`llama-phase env` says what is accepted")
