"""Keywords of Engine: the settings that mean something in one process, and what llama-server has flags for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from llama_phase.env import registry
from llama_phase.errors import UsageError
from llama_phase.generation import check_keywords
from llama_phase.settings import Settings

SIZES = ("ctx", "batch", "ubatch")
COUNTS = ("gpu_layers", "threads", "threads_batch")


@dataclass(frozen=True)
class EngineOptions:
    """`gpu_layers`: on the GPU, -1 for all; `cpu_experts`: expert weights stay in host memory all the same; `threads`,
    `threads_batch`: all physical cores if None; `trace_routing`: note which experts every token chose (slower);
    `verbose`: llama.cpp's log on stderr instead of its warnings alone."""

    LOG_LEVEL: ClassVar[dict[bool, int]] = {False: 3, True: 2}

    gpu_layers: int = 0
    cpu_experts: bool = False
    threads: int | None = None
    threads_batch: int | None = None
    trace_routing: bool = False
    verbose: bool = False


def load_settings(model: Path, settings: Settings | None, keywords: dict[str, Any]) -> tuple[EngineOptions, Settings]:
    """Split the keywords of Engine. Raises TypeError for one that is unknown, UsageError for values that do not fit."""
    options = [f.name for f in fields(EngineOptions)]
    engine_fields = [variable.field for variable in registry().values() if variable.scope == "engine"]
    of_settings = [*SIZES, *(name for name in engine_fields if name in Settings.model_fields)]
    check_keywords(keywords, [*options, *of_settings])
    sizes = {name: value for name, value in keywords.items() if name in of_settings}
    if settings is None:
        settings = Settings.load(model=model, of_server=False, **sizes)
    elif sizes:
        raise TypeError(f"either settings or {', '.join(sizes)}, not both")
    if settings.upstream:
        raise UsageError(
            f"Engine does not take llama-server's flags ({settings.upstream[0]})",
            fix=f"give keywords instead: {', '.join(options)}",
        )
    chosen = {name: value for name, value in keywords.items() if name in options}
    for name in COUNTS:
        value = chosen.get(name)
        if value is not None and not (isinstance(value, int) and -(2**31) <= value < 2**31):
            raise UsageError(f"{name} is no number the engine can take: {value!r}", fix="give a smaller whole number")
    return EngineOptions(**chosen), settings
