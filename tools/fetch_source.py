#!/usr/bin/env python3
"""Fetch, verify and unpack the pinned upstream source to llama.cpp/ (verb `make source`).

Exit codes: 0 the source is there and right, 3 something to install, 4 it cannot be had or is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from llama_phase.download_bar import download_bar
from llama_phase.errors import LlamaPhaseError
from llama_phase.source import ensure_source, project_root


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=("sdist", "git"), default="sdist", help="archive (default), or a clone")
    parser.add_argument("--verify", action="store_true", help="recompute the digest even if nothing seems changed")
    arguments = parser.parse_args()
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    try:
        source = ensure_source(
            project_root(Path(__file__).resolve().parent.parent),
            kind=arguments.source,
            verify=arguments.verify,
            report=say,
            progress=download_bar(console),
        )
    except LlamaPhaseError as error:
        say(f"error: {error}\n  fix: {error.fix}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command resumes")
        return 130
    print(f"{source.path}: {'pinned source' if source.pinned else 'not the pinned source'}, {source.tree_sha256[:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
