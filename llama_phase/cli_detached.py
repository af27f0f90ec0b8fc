"""`llama-phase down`, `status`, `logs` and `rollback`: about a supervisor that runs elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llama_phase.settings import Settings

Port = Annotated[int | None, typer.Option(help="Port of the server, when several run.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def mount(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (down, status, logs, rollback):
        app.command()(command)


def down(
    port: Port = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running requests.")] = False,
) -> None:
    """Stop a server and its supervisor; running requests may finish within the grace time."""
    from llama_phase.detached import stop
    from llama_phase.running_servers import reap_orphans

    folder = _find(port)
    orphans = reap_orphans(_settings(port).state_path / "running")
    for pid in orphans:
        _say(f"ended server {pid}, which had outlived its supervisor")
    stopped = folder is not None and stop(folder, _say, at_once=now)
    _say("stopped" if stopped or orphans else "nothing runs")


def status(
    port: Port = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show the state of a server: ready or not, restarts, rollbacks, the last failure. Exit code 0: it is ready."""
    from llama_phase.detached import look, summary
    from llama_phase.errors import LlamaPhaseError
    from llama_phase.supervisor_status import SupervisorStatus

    folder = _folder(port)

    def text(seen: SupervisorStatus) -> str:
        return json.dumps(seen.to_dict(), indent=1) if as_json else "\n".join(summary(seen))

    def now() -> str:
        try:
            return text(look(folder) or SupervisorStatus())
        except LlamaPhaseError as error:  # it may be told again in a moment
            return json.dumps({"error": str(error), "fix": error.fix}, indent=1) if as_json else f"error: {error}"

    if watch:
        _watch(now, as_json)
    seen = look(folder) or SupervisorStatus()
    print(text(seen))
    raise typer.Exit(0 if seen.state == "ready" else 1)


def logs(
    port: Port = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C, across restarts.")] = False,
    lines: Annotated[int, typer.Option("-n", min=0, help="How many of the last lines.")] = 50,
    supervisor: Annotated[bool, typer.Option("--supervisor", help="What a detached supervisor says.")] = False,
) -> None:
    """Show the log of a server."""
    from llama_phase.log_follow import follow as follow_log

    for line in follow_log(_folder(port), lines, follow, supervisor=supervisor):
        print(line, flush=follow)


def rollback(
    port: Port = None,
    to: Annotated[int | None, typer.Option(help="Number of the configuration [default: the one before].")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the configurations that served.")] = False,
    as_json: Json = False,
) -> None:
    """Go back to an earlier configuration that served."""
    from llama_phase.detached import roll_back

    folder = _folder(port)
    if not list_:
        roll_back(folder, to, _say)
        return
    _list(folder, as_json)


def _list(folder: Path, as_json: bool) -> None:
    import time

    from llama_phase.configuration import difference
    from llama_phase.detached import look
    from llama_phase.journal import Journal

    seen = look(folder)
    good = Journal(folder / "served").good()
    if as_json:
        rows = [{"number": r.number, "at_s": r.at_s, **r.configuration.to_dict()} for r in good]
        print(json.dumps(rows, indent=1))
        return
    if not good:
        print("no configuration has served yet")
    for index, record in enumerate(good):
        serving = seen is not None and seen.configuration == record.configuration.fingerprint
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at_s))
        mark = "  <- configuration of the supervisor" if serving else ""
        fingerprint = record.configuration.fingerprint
        print(f"{record.number:4}  {when}  {fingerprint}  {record.configuration.model}{mark}")
        if index + 1 < len(good):
            for line in difference(good[index + 1].configuration, record.configuration):
                print(f"        {line}")


def _watch(text: object, as_json: bool) -> None:
    import time

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    assert callable(text)
    console = Console()
    try:
        if as_json or not console.is_terminal:  # a line or block per change
            shown = ""
            while True:
                now = text()
                if now != shown:
                    print(now, flush=True)
                    shown = now
                time.sleep(0.5)
        with Live(Text(text()), console=console, refresh_per_second=4) as live:
            while True:
                live.update(Text(text()))
                time.sleep(0.25)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _folder(port: int | None) -> Path:
    from llama_phase.errors import LlamaPhaseError

    folder = _find(port)
    if folder is None:
        raise LlamaPhaseError("no supervisor was ever started here", fix="start one: `llama-phase up MODEL`")
    return folder


def _find(port: int | None) -> Path | None:
    from llama_phase.instance import find_folder

    settings = _settings(port)
    named = None if settings.source("port") == "default" else settings.port
    return find_folder(settings.state_path, settings.state_dir is not None, named)


def _settings(port: int | None) -> Settings:
    from llama_phase.config_file import config_files
    from llama_phase.settings import Settings

    return Settings.load(files=config_files(), model_needed=False, port=port)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
