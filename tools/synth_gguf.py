#!/usr/bin/env python3
"""Make a synthetic GGUF model (random weights) that llama.cpp loads and runs.

  tools/synth_gguf.py --preset tiny -o models/tiny.gguf

The same flags give the same bytes, and tensors are seeded by name, so models that differ by a flag share the rest:
--mtp no has the trunk of --mtp yes. A file that was made with the same flags is kept; with other flags, made again.

preset             architecture  size    notes
tiny               qwen4exp       55 MB  8 layers + MTP, 32 experts / 4 used in Q4_0, the rest F32; QSA, PLE
tiny-moe           qwen3moe       38 MB  plain attention, no MTP
tiny-35            qwen35moe      47 MB  gated delta net and attention, MTP
tiny[-moe|-35]-exact           32-50 MB  F32 throughout, narrower: with -fa off, same logits for any batch split
flash-next-small   qwen4exp       13 GB  24 layers, 512 experts / 10 used
flash-next         qwen4exp      104 GB  the shape of Qwen3.8-Flash-Next

exit codes: 0 made or already there, 2 wrong flag, 3 source, module or disk space missing, 7 place not writable,
130 interrupted, 143 terminated. Whatever happens, no half file is left.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# synth and llama_phase, also when this file is imported from elsewhere and nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from synth.checked_spec import make_spec
from synth.gguf_file import llama_cpp_dir, use_gguf_py
from synth.spec import CHOICES, PRESETS, ModelSpec

from llama_phase.errors import LlamaPhaseError

if TYPE_CHECKING:
    from synth.tensors import TensorList
    from synth.vocabulary import Vocabulary

PROGRESS_MIN_BYTES = 200_000_000  # below it takes about a second

OnBytes = Callable[[int, str], None]


def make_model(preset: str, path: Path, *, llama_cpp: Path | None = None, **overrides: Any) -> Path:
    """Make the model of ``preset`` with ``overrides`` (fields of ModelSpec) at ``path``, and return ``path``.

    Nothing is done if the file records the same flags. Raises UsageError (sizes, or a foreign file at ``path``),
    MissingPrerequisite (source, numpy, disk space) or ModelError (place not writable).
    """
    path = Path(path)
    spec = make_spec(preset, **overrides)
    source = llama_cpp_dir(llama_cpp)
    use_gguf_py(source)
    from synth.writer import is_made, write_model

    if not is_made(path, spec):
        plan, vocabulary = plan_tensors(spec, source)
        write_model(plan, vocabulary, path)
    return path


def plan_tensors(spec: ModelSpec, source: Path) -> tuple[TensorList, Vocabulary]:
    """Tensor list and tokenizer; use_gguf_py(source) must have run."""
    from synth.layers import plan_model
    from synth.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(spec, source)
    return plan_model(spec, vocabulary), vocabulary


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(args)
    except LlamaPhaseError as error:
        print(f"synth_gguf: {error}" + (f"\n  {error.fix}" if error.fix else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nsynth_gguf: interrupted, nothing left behind", file=sys.stderr)
        return 130


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _run(args: argparse.Namespace) -> int:
    chosen = {f.name: value for f in fields(ModelSpec) if (value := getattr(args, f.name)) is not None}
    spec = make_spec(args.preset, **chosen)
    source = llama_cpp_dir(args.llama_cpp)
    use_gguf_py(source)
    from synth.writer import is_made

    if args.output and not args.dry_run and is_made(args.output, spec):
        print(f"{args.output}: already made with these flags")
        return 0
    plan, vocabulary = plan_tensors(spec, source)
    if args.list:
        for t in plan.tensors:
            print(f"{t.name:40s} {t.type.name:5s} {list(t.shape)}")
    print(_summary(plan))
    if not args.dry_run:
        _write_with_progress(plan, vocabulary, args.output)
        print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


def _summary(plan: TensorList) -> str:
    total = sum(t.n_bytes for t in plan.tensors)
    experts = sum(t.n_bytes for t in plan.tensors if "_exps." in t.name)
    weights = sum(math.prod(t.shape) for t in plan.tensors)
    return (
        f"{plan.spec.arch}: {len(plan.tensors)} tensors, {weights / 1e9:.3f} B weights, {total / 1e9:.3f} GB "
        f"(experts {experts / 1e9:.3f} GB, {'rows of a pool' if plan.experts_are_pooled else 'each drawn on its own'})"
    )


def _write_with_progress(plan: TensorList, vocabulary: Vocabulary, path: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from synth.writer import write_model

    console = Console(stderr=True)
    total = sum(t.n_bytes for t in plan.tensors)
    if not console.is_terminal or total < PROGRESS_MIN_BYTES:
        write_model(plan, vocabulary, path)
        return
    name = TextColumn("{task.description}")
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), name)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        write_model(plan, vocabulary, path, lambda n, name: progress.update(task, advance=n, description=name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="synth_gguf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("-o", "--output", type=Path, help="GGUF file to make")
    target.add_argument("--dry-run", action="store_true", help="only print the sizes")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="default: tiny")
    parser.add_argument("--list", action="store_true", help="list the tensors")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="its source (LLAMA_CPP_DIR, llama.cpp/)")
    sizes = parser.add_argument_group("sizes and statistics, each overrides the preset")
    for f in fields(ModelSpec):
        name, meaning = "--" + f.name.replace("_", "-"), f"{f.metadata['meaning']} ({f.default})".replace("%", "%%")
        if isinstance(f.default, bool):
            sizes.add_argument(name, action=argparse.BooleanOptionalAction, help=meaning)
        else:
            sizes.add_argument(name, type=type(f.default), choices=CHOICES.get(f.name), help=meaning)
    return parser


if __name__ == "__main__":
    sys.exit(main())
