"""One server configuration as data that outlives the process: what is journalled, compared and gone back to.

Not part of it: where the server listens, who may ask (API key) and how it is supervised. Those are never rolled back:
clients expect the server where it was asked for last, and secrets are not written down.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_phase.settings import Settings

# settings of the supervisor, of the address, and secrets; all others decide how the server runs
NOT_OF_THE_SERVER = frozenset(
    {"host", "port", "api_key", "grace_s", "stall_s", "restarts", "rollback", "state_dir", "keep_conversations",
     "conversations_every_s", "metrics_port", "check_plan"}
)  # fmt: skip
ENVIRONMENT_PREFIXES = ("LLAMA_", "GGML_", "CUDA_", "NVIDIA_", "OMP_", "GOMP_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NOT_CONFIGURATION = ("LLAMA_PHASE_",)  # in the settings already


@dataclass(frozen=True)
class Configuration:
    """`settings`: those not in NOT_OF_THE_SERVER, as JSON types; `environment`: what else of it the engine reads.

    Two are the same when their fingerprints are. `engine` (id of the build, or the program's path) only says what ran
    it: a build that is gone cannot be gone back to.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    engine: str = ""

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits."""
        text = json.dumps([self.settings, self.environment], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def model(self) -> str:
        return Path(str(self.settings.get("model", ""))).name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Configuration:
        """Raises TypeError, KeyError or ValueError for data that is none."""
        settings, environment = dict(data["settings"]), dict(data["environment"])
        if not isinstance(settings.get("model"), str):
            raise ValueError("no model")
        return cls(settings, {str(k): str(v) for k, v in environment.items()}, str(data["engine"]))


def configuration_of(settings: Settings, engine: str, base: Mapping[str, str] | None = None) -> Configuration:
    """The configuration these settings ask for; `base` is the environment (default: this process's)."""
    base = os.environ if base is None else base
    values = settings.model_dump(mode="json", exclude=set(NOT_OF_THE_SERVER))
    values["model"] = str(settings.model.expanduser().absolute())  # the next start may be in another folder
    environment = {
        name: value
        for name, value in base.items()
        if name.startswith(ENVIRONMENT_PREFIXES)
        and not name.startswith(_NOT_CONFIGURATION)
        and not any(word in name for word in _SECRET)
    }
    return Configuration(dict(sorted(values.items())), dict(sorted(environment.items())), engine)


def settings_for(configuration: Configuration, asked: Settings) -> Settings:
    """`asked` with everything that belongs to the configuration replaced.

    A setting that is newer than the configuration has its default. Raises ValueError when this version cannot read it.
    """
    kind = type(asked)
    fields = {name: field for name, field in kind.model_fields.items() if name not in NOT_OF_THE_SERVER}
    defaults = {name: field.get_default() for name, field in fields.items() if not field.is_required()}
    values = {name: value for name, value in configuration.settings.items() if name in fields}
    return kind(**asked.model_dump(include=set(NOT_OF_THE_SERVER)) | defaults | values)


def environment_for(configuration: Configuration, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the engine's part of the environment replaced by the configuration's."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(ENVIRONMENT_PREFIXES)
        or name.startswith(_NOT_CONFIGURATION)
        or any(word in name for word in _SECRET)
    }
    return kept | configuration.environment


def difference(old: Configuration, new: Configuration) -> list[str]:
    """What changed, one `name: old -> new` each; for the log and `rollback --list`."""
    lines = []
    for label, before, after in (("", old.settings, new.settings), ("$", old.environment, new.environment)):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                lines.append(f"{label}{name}: {_text(before.get(name))} -> {_text(after.get(name))}")
    if old.engine != new.engine:
        lines.append(f"engine: {old.engine} -> {new.engine}")
    return lines


def _text(value: Any) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
