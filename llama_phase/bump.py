"""Try the patch queue on another upstream release and print the lock file that would pin it (docs/bump.md).

Nothing of the checkout is changed: the release is unpacked to build/bump/<tag>.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from llama_phase import download
from llama_phase.errors import SourceError, UsageError
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import LOCK, Lock, ensure_source, unpack
from llama_phase.tree import tree_digest


def release_number(ref: str) -> int:
    """11434 for b11434; raises UsageError for anything else."""
    match = re.fullmatch(r"b?(\d{4,})", ref)
    if not match:
        raise UsageError(f"{ref!r} is not an upstream release tag", fix="a tag such as b11500: `make bump REF=b11500`")
    return int(match[1])


def try_release(
    root: Path, ref: str, *, tree: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, str]]:
    """(text of the new lock, outcome per patch). ``tree``: an unpacked release; without it the archive is fetched.

    Raises SourceError when the release is not to be had.
    """
    lock, number = Lock.read(root), release_number(ref)
    values = {"tag": f"b{number}", "build_number": str(number), "version": f"{number}.0.0"}
    if tree is None:
        name, url, sha256 = download.index_file(lock.name, values["version"], environ)
        if not sha256:
            raise SourceError(f"the package index states no sha256 of {name}", fix="use another index")
        archive = download.fetch(url, name, sha256, folder=download.cache_folder(), environ=environ)
        tree = root / "build" / "bump" / f"b{number}"
        shutil.rmtree(tree, ignore_errors=True)
        unpack(archive, lock.folder, tree)
        values |= {"file": name, "sha256": sha256}
    elif not (tree / "CMakeLists.txt").is_file():
        raise SourceError(f"{tree} is not a llama.cpp tree (no CMakeLists.txt)", fix="give the unpacked folder")
    values["tree_sha256"] = tree_digest(tree)
    report = PatchQueue(root, ensure_source(root, environ=environ).path).trial(tree)
    return lock_text((root / LOCK).read_text(), values), report


def lock_text(text: str, values: Mapping[str, str]) -> str:
    """``text`` of a lock file with some values replaced; comments and everything else stay."""
    for key, value in values.items():
        shown = value if key == "build_number" else f'"{value}"'
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {shown}", text, count=1, flags=re.MULTILINE)
        if not count:
            raise SourceError(f"{LOCK} has no line for {key}", fix="restore it: `git checkout llama.cpp.lock`")
    return text
