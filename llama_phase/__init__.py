"""llama-phase: a phase-switching overlay on llama.cpp, and what builds, serves and measures it.

`Engine` runs a model in this process, `Client` talks to a running server; `attach` and `environment` are for
llama-cpp-python on our libraries (`library_path`). `llama_phase.sim` replays routing traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_phase.client import Client as Client
    from llama_phase.controls import attach as attach
    from llama_phase.engine import Engine as Engine
    from llama_phase.engine_library import library_path as library_path
    from llama_phase.process_environment import environment as environment
    from llama_phase.settings import Settings as Settings

__version__ = "0.1.0"
__all__ = ["Client", "Engine", "Settings", "attach", "environment", "library_path"]

_HOMES = {
    "Client": "client",
    "Engine": "engine",
    "Settings": "settings",
    "attach": "controls",
    "environment": "process_environment",
    "library_path": "engine_library",
}


def __getattr__(name: str) -> Any:
    """Imported at first use: `llama-phase --help` needs none of them."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
