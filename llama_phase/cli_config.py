"""`llama-phase config` and `llama-phase systemd`: what is in force, and a unit that keeps it served. Printing only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llama_phase.settings import Settings

config = typer.Typer(help="Show the settings in force.", no_args_is_help=True, rich_markup_mode=None)
# beside LLAMA_PHASE_*: what changes how a server runs, as against the rest of the user's environment
SHOWN_PREFIXES = ("LLAMA_", "GGML_", "CUDA_", "NVIDIA_", "OMP_", "HF_")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@config.callback()
def _group() -> None:
    pass


@config.command()
def show(
    model: Annotated[Path | None, typer.Argument(help="GGUF file, as for `serve`.")] = None,
    upstream: Annotated[list[str] | None, typer.Argument(help="After `--`: flags for llama-server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show every setting of `serve`, where it comes from, and the environment the server would get."""
    from llama_phase.config_file import config_files
    from llama_phase.settings import Settings

    if model is not None and str(model).startswith("-"):  # `config show -- -ub 256`
        model, upstream = None, [str(model), *(upstream or [])]
    files = config_files()
    settings = Settings.load(model=model, upstream=upstream or (), files=files, model_needed=False)
    facts = describe(settings, files, os.environ)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for path in facts["files"] or ["none"]:
        print(f"file: {path}")
    width = max(len(name) for name in facts["settings"])
    for name, row in facts["settings"].items():
        value = " ".join(row["value"]) if isinstance(row["value"], list) else row["value"]
        print(f"{name:{width}}  {'' if value is None else value}  ({row['source']})")
    print("flags of the server:\n  " + " ".join(facts["argv"]))
    print("environment of the server (the rest is this shell's):")
    for name, value in facts["environment"].items():
        print(f"  {name}={value}")
    for name, why in facts["left_out"].items():
        print(f"  without {name}: {why}")


def describe(settings: Settings, files: list[Path], base: Mapping[str, str]) -> dict[str, Any]:
    """Settings by name with value and source, argv, environment of the server and what is left out of it.

    Secrets are shown as `(set)`.
    """
    from llama_phase.env import PREFIX, child_environment, left_out
    from llama_phase.settings import argv

    rows = {}
    for name, value in settings.model_dump(mode="json").items():
        rows[name] = {"value": value, "source": settings.source(name)}
    if settings.api_key is not None:
        rows["api_key"]["value"] = "(set)"
    if settings.source("model") == "default":
        rows["model"] = {"value": None, "source": "not given"}
    child = child_environment(settings, base)
    shown = {name: value for name, value in sorted(child.items()) if name.startswith(SHOWN_PREFIXES)}
    for name in shown:
        if any(word in name.upper() for word in SECRET_WORDS):
            shown[name] = "(set)"
    reasons = {name: left_out(name, base[name]) for name in sorted(base) if not name.startswith(PREFIX)}
    return {
        "files": [str(path) for path in files],
        "settings": rows,
        "argv": argv(settings),
        "environment": shown,
        "left_out": {name: why for name, why in reasons.items() if why and name not in child},
    }
