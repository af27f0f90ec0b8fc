"""`llama-phase serve` and `up`: one set of options, in the foreground or detached."""

from __future__ import annotations

import os
import sys
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_phase.errors import UsageError

if TYPE_CHECKING:
    from llama_phase.settings import Settings


def mount(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(serve)
    app.command("up", help="Serve a model in the background; comes back when it is ready.")(up)


def serve(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; of a split model the first shard.")] = None,
    upstream: Annotated[list[str] | None, typer.Argument(help="After `--`: flags for llama-server.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port, 0 for any free one [default: 8080].")] = None,
    ctx: Annotated[int | None, typer.Option(help="Context in tokens [default: the model's].")] = None,
    ubatch: Annotated[int | None, typer.Option(help="Micro-batch of the decode phase [default: 512].")] = None,
    batch: Annotated[int | None, typer.Option(help="Logical batch [default: fits the prefill].")] = None,
    prefill_mode: Annotated[str | None, typer.Option(help="off, transaction, bypass [default: transaction].")] = None,
    prefill_ubatch: Annotated[str | None, typer.Option(help="Of the prefill phase, or auto [default: 2048].")] = None,
    prefill_min_tokens: Annotated[str | None, typer.Option(help="New tokens worth a switch [default: auto].")] = None,
    slots: Annotated[str | None, typer.Option(help="Experts per layer on the GPU, or auto [default: 0].")] = None,
    mtp: Annotated[
        str | None, typer.Option(help="MTP drafts: auto (or no value), off, N tokens [default: off].")
    ] = None,
    spec: Annotated[str | None, typer.Option(help="Other types of speculation, comma-separated.")] = None,
    draft_device: Annotated[str | None, typer.Option(help="Device of a draft model (-md).")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, auto [default: auto].")] = None,
    log: Annotated[str | None, typer.Option(help="quiet, info, debug [default: info].")] = None,
    grace: Annotated[int | None, typer.Option(help="Seconds a server may take to stop [default: 10].")] = None,
    restarts: Annotated[int | None, typer.Option(help="Restarts in a row before giving up [default: 5].")] = None,
    rollback: Annotated[
        bool | None, typer.Option("--rollback/--no-rollback", help="Go back to what served last [default: yes].")
    ] = None,
    keep_conversations: Annotated[
        bool | None, typer.Option("--keep-conversations", help="Save them on stop, restore them at start.")
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port for Prometheus metrics [default: none].")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key (or LLAMA_PHASE_API_KEY).")] = None,
) -> None:
    """Serve a model until Ctrl-C.

    Flags of llama-server go after `--`:  llama-phase serve model.gguf -- -ngl 99 --n-cpu-moe 40
    """
    settings = load_settings(**locals())
    from rich.console import Console

    from llama_phase.foreground import serve as serve_in_foreground

    raise typer.Exit(serve_in_foreground(settings, Console(stderr=True)))


@wraps(serve)
def up(**options: Any) -> None:
    settings = load_settings(**options)
    from llama_phase.detached import start

    start(settings, sys.argv[sys.argv.index("up") + 1 :], lambda line: print(line, file=sys.stderr))


def with_values(words: list[str]) -> list[str]:
    """Adds the `auto` that `--mtp` without a value means: before `--`, when what follows is no value but nothing, the
    next option, or a model."""
    end = words.index("--") if "--" in words else len(words)
    out: list[str] = []
    for word, after in zip_longest(words[:end], words[1:end], fillvalue=""):
        out.append(word)
        if word == "--mtp" and (not after or after.startswith("-") or after.endswith(".gguf") or os.path.isfile(after)):
            out.append("auto")
    return out + words[end:]


def load_settings(
    *,
    model: Path | None,
    upstream: list[str] | None,
    slots: str | None,
    grace: int | None,
    api_key_file: Path | None,
    **flags: Any,
) -> Settings:
    """The settings that these options and the environment ask for. Raises UsageError."""
    from llama_phase.address import read_api_key
    from llama_phase.config_file import config_files
    from llama_phase.settings import Settings

    if model is not None and str(model).startswith("-"):  # `serve -- -ngl 99`, the model comes from the environment
        model, upstream = None, [str(model), *(upstream or [])]
    if upstream and not upstream[0].startswith("-"):
        raise UsageError(f"one model is served, and {upstream[0]!r} is one too many", fix="see `serve --help`")
    return Settings.load(
        model=model,
        upstream=upstream or (),
        files=config_files(),
        expert_slots=slots,
        grace_s=grace,
        api_key=read_api_key(api_key_file) if api_key_file else None,
        **flags,
    )
