"""`llama-phase config` and `llama-phase systemd`: what is in force, and a unit that keeps it served. Printing only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_phase.cli_serve import load_settings, serve, with_values

if TYPE_CHECKING:
    from llama_phase.settings import Settings

config = typer.Typer(help="Show the settings in force.", no_args_is_help=True, rich_markup_mode=None)
# beside LLAMA_PHASE_*: what changes how a server runs, as against the rest of the user's environment
SHOWN_PREFIXES = ("LLAMA_", "GGML_", "CUDA_", "NVIDIA_", "OMP_", "HF_")
# which devices a program sees, and where files and libraries are
DEVICE_PREFIXES = ("HIP_", "ROCR_")
PLACES = ("LD_LIBRARY_PATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@config.callback()
def _group() -> None:
    pass


def _as_serve(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the arguments and options of `serve` before its own."""
    own = list(signature(command, eval_str=True).parameters.values())
    taken = list(signature(serve, eval_str=True).parameters.values())
    command.__signature__ = Signature([*taken, *own[:-1]])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in [*taken, *own[:-1]]}
    return command


@config.command()
@_as_serve
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    **options: Any,
) -> None:
    """Show every setting of `serve`, where it comes from, and the environment the server would get.

    It takes the arguments and options of `serve`, none of them needed.
    """
    from llama_phase.config_file import config_files

    files = config_files()
    settings = load_settings(**options, model_needed=False)
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
    without = "" if settings.source("model") != "default" else " (no model is given)"
    print(f"flags of the server{without}:\n  " + " ".join(facts["argv"]))
    print("environment of the server (the rest is this shell's):")
    for name, value in facts["environment"].items():
        print(f"  {name}={value}")
    for name, why in facts["left_out"].items():
        print(f"  without {name}: {why}")


def describe(settings: Settings, files: list[Path], base: Mapping[str, str]) -> dict[str, Any]:
    """Settings by name with value and source, argv, environment of the server and what is left out of it.

    Secrets are shown as `(set)`. Without a model argv has none either.
    """
    from llama_phase.env import PREFIX, child_environment, left_out
    from llama_phase.settings import argv

    rows = {}
    for name, value in settings.model_dump(mode="json").items():
        rows[name] = {"value": value, "source": settings.source(name)}
    if settings.api_key is not None:
        rows["api_key"]["value"] = "(set)"
    flags = argv(settings)
    if settings.source("model") == "default":
        at = flags.index("-m")
        del flags[at : at + 2]
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
        "argv": flags,
        "environment": shown,
        "left_out": {name: why for name, why in reasons.items() if why and name not in child},
    }


systemd = typer.Typer(help="Keep a model served by systemd.", no_args_is_help=True, rich_markup_mode=None)


@systemd.callback()
def _systemd_group() -> None:
    pass


@systemd.command()
def install(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[SERVE]...", help="After `--`: what you would type after `serve`.")
    ] = None,
    user: Annotated[bool, typer.Option("--user", help="For this user (the only kind).")] = False,
    show_only: Annotated[bool, typer.Option("--print", help="Print the unit, write nothing.")] = False,
    name: Annotated[str, typer.Option(help="Name of the unit.")] = "llama-phase",
) -> None:
    """Write a unit that serves a model as `serve` would, from this folder.

    llama-phase systemd install --user -- model.gguf --slots auto -- -ngl 99
    """
    from llama_phase.errors import LlamaPhaseError, UsageError
    from llama_phase.systemd import user_unit_path
    from llama_phase.tree import write_atomically

    if not (user or show_only):
        raise UsageError("units are written for one user", fix="add --user, or --print and put the unit where you like")
    if not name or "/" in name or not name.isprintable() or " " in name:
        raise UsageError(f"{name!r} is no name for a unit", fix="use letters, digits and -: --name llama-phase")
    text = _unit(words or [])
    if show_only:
        print(text, end="")
        return
    path = user_unit_path(name, os.environ)
    before = path.read_text(encoding="utf-8") if path.is_file() else text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise LlamaPhaseError(f"cannot write {path}: {error.strerror}", fix="allow it, or use --print") from None
    print(f"{'written' if before == text else 'replaced'}: {path}")
    print(f"next: systemctl --user daemon-reload && systemctl --user enable --now {name}")
    print("to serve while you are logged out: loginctl enable-linger")


def carried(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The part of `base` that `serve` runs by, which a service would not have: what these settings were taken from,
    what decides how the engine runs, and where files and libraries are found."""
    from llama_phase.configuration import ENVIRONMENT_PREFIXES
    from llama_phase.env import PREFIX, left_out
    from llama_phase.settings import UPSTREAM_ENVIRONMENT
    from llama_phase.upstream_flags import FLAG_ENVIRONMENT

    found = {}
    fields = {variable: field for field, variable in UPSTREAM_ENVIRONMENT.items()}
    for name, value in sorted(base.items()):
        if name in fields:
            wanted = settings.source(fields[name]) == f"environment {name}"
        elif name.startswith(PREFIX) or name in FLAG_ENVIRONMENT:
            wanted = bool(value)
        elif name.startswith((*ENVIRONMENT_PREFIXES, *DEVICE_PREFIXES)):
            wanted = not left_out(name, value)
        else:
            wanted = name in PLACES and bool(value)
        if wanted:
            found[name] = value
    return found


def is_secret(name: str) -> bool:
    """Whether the value of a variable is for nobody else's eyes; a file's path and a count of tokens are not."""
    return any(word in name.upper() for word in SECRET_WORDS) and not name.upper().endswith(("_FILE", "_TOKENS"))


def _unit(words: list[str]) -> str:
    """The unit for `serve` with these words, which are checked first. Raises UsageError."""
    import sys

    from llama_phase.cli import app
    from llama_phase.errors import UsageError
    from llama_phase.systemd import unit_text

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    given = command.make_context("serve", with_values(words)).params
    settings = load_settings(**given)
    environment = carried(settings, os.environ)
    for name in environment:
        if is_secret(name):
            raise UsageError(
                f"{name} would stand in the unit for all to read",
                fix="unset it and put it into llama-phase.toml (chmod 600), or pass --api-key-file FILE to `serve`"
                if name.endswith("API_KEY")
                else f"unset it: `env -u {name} llama-phase systemd install ...`",
            )
    return unit_text(
        [sys.executable, "-m", "llama_phase.cli", "serve", *words],
        folder=Path.cwd(),
        description=f"llama-phase serving {settings.model.name}",
        environment=environment,
        grace_s=settings.grace_s,
    )
