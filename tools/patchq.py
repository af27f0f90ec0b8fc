#!/usr/bin/env python3
"""Patch queue: prepare (pristine -> build/src), export (build/src -> patches), check, status, bump.

Exit codes: 0 done, 2 wrong usage, 4 source missing or wrong, 5 a patch fails or a rule is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from llama_phase.errors import LlamaPhaseError
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import ensure_source, project_root

ROOT = project_root(Path(__file__).resolve().parent.parent)


def queue() -> PatchQueue:
    source = ensure_source(ROOT, environ=os.environ, report=lambda line: print(line, file=sys.stderr))
    return PatchQueue(ROOT, source.path, pristine_id=source.tree_sha256)


def prepare(arguments: argparse.Namespace) -> int:
    outcome = queue().prepare(discard=arguments.discard, allow_offsets=arguments.allow_offsets, skip=arguments.skip)
    print(f"build/src: {len(outcome.written)} files written, {len(outcome.removed)} removed")
    if outcome.edited:
        print(f"not yet in a patch (make export): {', '.join(outcome.edited)}", file=sys.stderr)
    return 0


def export(arguments: argparse.Namespace) -> int:
    result = queue().export(into=arguments.into, force=arguments.force)
    print(f"rewritten: {', '.join(result.rewritten) or 'none'}; unchanged: {len(result.unchanged)}")
    return 0


def check(_: argparse.Namespace) -> int:
    patches = queue()
    problems = patches.check()
    if patches.source.is_dir():
        found = patches.difference()
        problems += [
            f"build/src: {path} has edits that are in no patch (make export)" for path in found.edited + found.extra
        ]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"patches: {len(patches.series())} in order")
    return 5 if problems else 0


def status(_: argparse.Namespace) -> int:
    patches = queue()
    for patch in patches.load():
        print(f"{patch.name}: +{patch.added_lines} of {patch.budget}, {', '.join(patch.files)}")
    found = patches.difference()
    for label, files in (("edited", found.edited), ("new", found.extra), ("missing", found.missing)):
        for file in files:
            print(f"{label}: {file}")
    return 0


def bump(arguments: argparse.Namespace) -> int:
    from llama_phase.bump import try_release  # needs the network

    lock_text, report = try_release(ROOT, arguments.ref, tree=arguments.tree)
    for name, outcome in report.items():
        print(f"{name}: {outcome}")
    print("\nnew llama.cpp.lock (docs/bump.md has the next steps):\n\n" + lock_text)
    return 5 if any(not outcome.startswith("applies") for outcome in report.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("prepare", help="pristine source plus patches -> build/src")
    verb.add_argument("--discard", action="store_true", help="drop edits in build/src that are in no patch")
    verb.add_argument("--allow-offsets", action="store_true", help="accept hunks found at other lines")
    verb.add_argument(
        "--skip", action="append", default=[], metavar="PATCH", help="leave out, to make it again by hand"
    )
    verb.set_defaults(run=prepare)
    verb = verbs.add_parser("export", help="edits in build/src -> patches")
    verb.add_argument("--into", default="", metavar="PATCH", help="patch for edited files that belong to none")
    verb.add_argument("--force", action="store_true", help="build/src wins over patches changed since prepare")
    verb.set_defaults(run=export)
    verbs.add_parser("check", help="rules, headers, budget and round trip").set_defaults(run=check)
    verbs.add_parser("status", help="patches, their sizes, and edits not exported").set_defaults(run=status)
    verb = verbs.add_parser("bump", help="try the queue on another upstream release")
    verb.add_argument("ref", help="upstream tag, such as b11500")
    verb.add_argument("--tree", type=Path, help="an unpacked tree of that release, instead of fetching it")
    verb.set_defaults(run=bump)
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments)
    except LlamaPhaseError as error:
        print(f"error: {error}\n  fix: {error.fix}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
