"""The command line: parsing and printing only. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from llama_phase import __version__, cli_config, cli_detached, cli_serve
from llama_phase.env import PREFIX
from llama_phase.errors import LlamaPhaseError, UsageError

app = typer.Typer(
    name="llama-phase",
    help="Serve MoE GGUF models larger than the VRAM: build, start and watch a phase-switching llama-server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
BACKENDS = ("cpu", "cuda")
# typer brings click along, under a module name that depends on its version
ParseError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _print_version(asked: bool) -> None:
    if asked:
        for line in version_lines():
            print(line)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def build(
    backend: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where nvcc is found.")] = "auto",
    stock: Annotated[bool, typer.Option("--stock", help="Without our patches, for comparison.")] = False,
) -> None:
    """Fetch, patch and compile the engine."""
    from llama_phase.build import build as build_engine
    from llama_phase.build import default_backends

    backends, remark = ([backend], "") if backend != "auto" else default_backends(os.environ)
    if remark:
        print(remark, file=sys.stderr)
    for name in backends:
        build_engine(backend=name, stock=stock)


@app.command()
def demo() -> None:
    """See it work: stock against phase, on a synthetic model and a real one."""
    from llama_phase.demo import run

    run()


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="GGUF file; of a split model the first shard.")],
    upstream: Annotated[list[str] | None, typer.Argument(help="After `--`: flags for llama-server.")] = None,
    vram: Annotated[str | None, typer.Option(help="Free GiB of each GPU, like 24,24 [default: as here].")] = None,
    ram: Annotated[str | None, typer.Option(help="GiB of RAM [default: as here].")] = None,
    pcie: Annotated[str | None, typer.Option(help="Link of the GPUs, for example 3x16 or 4x16,4x8.")] = None,
    ctx: Annotated[int | None, typer.Option(help="Context in tokens [default: the model's].")] = None,
    slots: Annotated[str | None, typer.Option(help="Experts per layer on the GPU, or auto [default: auto].")] = None,
    ubatch: Annotated[int | None, typer.Option(help="Micro-batch of the decode phase [default: 512].")] = None,
    prefill_ubatch: Annotated[str | None, typer.Option(help="Of the prefill phase, or auto [default: 2048].")] = None,
    mtp: Annotated[
        str | None, typer.Option(help="MTP drafts: auto (or no value), off, N tokens [default: off].")
    ] = None,
    facts: Annotated[Path | None, typer.Option(help="Facts of another machine (`doctor --record`).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it, too: plan.png, .svg or .pdf.")] = None,
    checked: Annotated[
        bool, typer.Option("--checked", help="Show how right it was when this was last served.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Say what a model will need, before it is loaded. Exit code 1: it does not fit."""
    from llama_phase.config_file import config_files
    from llama_phase.gguf_facts import read_facts
    from llama_phase.given_machine import read_machine, with_given
    from llama_phase.hardware import probe
    from llama_phase.plan import plan_server
    from llama_phase.plan_choices import Choices
    from llama_phase.plan_devices import used_by
    from llama_phase.plan_draft import not_planned
    from llama_phase.plan_report import Report
    from llama_phase.plan_text import lines
    from llama_phase.settings import Settings
    from llama_phase.upstream_flags import DRAFT_MODEL, flag_value

    settings = Settings.load(
        model=model,
        upstream=upstream or (),
        files=config_files(),
        ctx=ctx,
        expert_slots=slots,
        ubatch=ubatch,
        prefill_ubatch=prefill_ubatch,
        mtp=mtp,
    )
    if checked:
        from llama_phase import plan_check

        found = plan_check.find(settings.state_path, model)
        if not found:
            raise LlamaPhaseError(f"no plan for {model} was compared yet", fix="serve it with `-ngl 99 --cpu-moe`")
        print("\n".join(plan_check.lines(found)))
        return
    about = read_facts(model, flag_value(settings.upstream, DRAFT_MODEL))
    if why := not_planned(settings, about):
        raise UsageError(f"no plan: {why}", fix="plan without that flag, and leave room for what it changes")
    given = with_given(read_machine(facts) if facts else probe(), vram=vram, ram=ram, pcie=pcie)
    machine = used_by(given, settings.upstream)
    report = Report(about, machine, plan_server(about, machine, Choices.of(settings, about)))
    if plot is not None:
        from llama_phase.plan_plot import write_plot

        write_plot(report, plot)
    print(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(lines(report)))
    raise typer.Exit(0 if report.plan.fits else 1)


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Argument(help="A model to check, and to compare memory with.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that should be free [default: 8080].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the machine's facts here, for `plan --facts`.")] = None,
) -> None:
    """Check machine, engine and model, changing nothing. Exit code 1: there is a problem."""
    from dataclasses import asdict

    from llama_phase.config_file import config_files
    from llama_phase.doctor import examine, exit_code
    from llama_phase.hardware import probe, to_json
    from llama_phase.settings import Settings

    settings = Settings.load(model=model, files=config_files(), model_needed=False, port=port)
    named = settings.model if settings.source("model") != "default" else None
    machine = probe()
    if record is not None:
        try:
            record.write_text(to_json(machine), encoding="utf-8")
        except OSError as error:
            raise LlamaPhaseError(f"cannot write {record}: {error.strerror}", fix="choose another place") from None
    checks = examine(
        machine,
        root=Path(__file__).resolve().parent.parent,
        state=settings.state_path,
        hosts=settings.tcp_hosts,
        port=settings.port,
        model=named,
        binary=settings.server_binary,
    )
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "machine": asdict(machine)}, indent=2))
    else:
        for check in checks:
            fix = f"  (fix: {check.fix})" if check.fix else ""
            print(f"{check.result:8} {check.name:14} {check.text}{fix}")
    raise typer.Exit(exit_code(checks))


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Show every LLAMA_PHASE_* variable, its value for `serve`, and where that comes from."""
    from llama_phase.config_file import config_files
    from llama_phase.env import describe, scan

    rows = describe(files=config_files())
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    scan()


@app.command()
def version() -> None:
    """Show the package's version and the ids of the built engines."""
    for line in version_lines():
        print(line)


def version_lines() -> list[str]:
    """`llama-phase 0.1.0`, then a line per built engine."""
    lines = [f"llama-phase {__version__}"]
    for backend in BACKENDS:
        engine = engine_id(backend)
        if engine:
            lines.append(f"engine ({backend}): {engine}")
    return lines if len(lines) > 1 else [*lines, "engine: none built, run `llama-phase build`"]


def engine_id(backend: str) -> str | None:
    """Id of the built engine of a backend, None when there is none."""
    from llama_phase.engine_id import engine_folder, read

    info = read(engine_folder(Path(__file__).resolve().parent.parent, backend, stock=False))
    return None if info is None else info.id


def _print_table(rows: list[dict[str, object]]) -> None:
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, 120)
    for row in rows:
        about = f"{row['source']}; default {row['default'] or 'none'}; {row['accepted']}"
        print(f"{row['name']} = {row['value']}  ({about})")
        print(textwrap.fill(str(row["meaning"]), width, initial_indent="    ", subsequent_indent="    "))


def _fail(message: str, fix: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody to tell: the code remains
        print(f"error: {message}", file=sys.stderr)
        if fix:
            print(f"fix: {fix}", file=sys.stderr)
    return code


cli_serve.mount(app)
cli_detached.mount(app)
app.add_typer(cli_config.config, name="config")
app.add_typer(cli_config.systemd, name="systemd")


def main() -> int:
    """Run the command line; the exit codes are in docs/exit-codes.md."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would keep no exit status for us
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return code or _fail(f"cannot write the output: {error.strerror}", "make room, or send it elsewhere", 1)
    return code


def _run(words: list[str]) -> int:
    try:
        return int(app(args=cli_serve.with_values(words), standalone_mode=False) or 0)
    except LlamaPhaseError as error:
        return _fail(str(error), error.fix, error.exit_code)
    except ParseError as error:
        kind, text = type(error).__name__, error.format_message()  # type: ignore[attr-defined]
        if kind == "NoArgsIsHelpError":
            print(text)
            return 2
        fix = "flags of llama-server go after `--`; ours: --help" if kind == "NoSuchOption" else "see --help"
        return _fail(text, fix, 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except SystemExit as end:
        # click turns a reader that has gone away into exit code 1
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0
    except (OSError, ValueError, RecursionError) as error:
        return _fail(*_explained(error), 1)


def _explained(error: Exception) -> tuple[str, str]:
    """Sentence and fix for a failure that nothing has made one of ours."""
    if os.environ.get(PREFIX + "LOG") == "debug":
        import traceback

        traceback.print_exception(error)
    fix = f"{PREFIX}LOG=debug shows where it comes from"
    if isinstance(error, OSError):
        if not _current_folder_exists():
            return "the current folder was deleted", f"go to another: cd; {fix}"
        names = " to ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return (f"cannot use {names}: " if names else "") + (error.strerror or str(error) or type(error).__name__), fix
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", fix


def _current_folder_exists() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """What is still in the buffer goes nowhere, so that the interpreter's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
