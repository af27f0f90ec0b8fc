"""The pinned upstream source: llama.cpp.lock -> llama.cpp/, verified, never edited.

Order: archive hash, then unpack to a temporary folder beside the target, then tree digest, then rename. So llama.cpp/
is either complete and right or not there. A stamp (build/source.json) with a cheap fingerprint lets later runs skip
the digest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llama_phase.errors import MissingPrerequisite, SourceError
from llama_phase.tree import fingerprint, tree_digest, write_atomically

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

LOCK = "llama.cpp.lock"
Report = Callable[[str], None]
Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Lock:
    tag: str
    build_number: int
    tree_sha256: str
    name: str
    version: str
    file: str
    folder: str
    sha256: str
    repository: str

    @classmethod
    def read(cls, root: Path) -> Lock:
        path = root / LOCK
        try:
            data: dict[str, Any] = tomllib.loads(path.read_text())
            sdist = data["sdist"]
            return cls(
                data["tag"],
                int(data["build_number"]),
                data["tree_sha256"],
                sdist["name"],
                sdist["version"],
                sdist["file"],
                sdist["folder"],
                sdist["sha256"],
                data["git"]["repository"],
            )
        except FileNotFoundError:
            raise SourceError(f"{path} does not exist", fix="restore it: `git checkout llama.cpp.lock`") from None
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{path} is damaged: {error!r}", fix="`git checkout llama.cpp.lock`") from None


@dataclass(frozen=True)
class Source:
    """A source tree to build from. ``pinned``: it is exactly what the lock says."""

    path: Path
    tree_sha256: str
    pinned: bool


def project_root(start: Path | None = None) -> Path:
    """The checkout this package runs from; raises MissingPrerequisite when it was installed without one."""
    root = start or Path(__file__).resolve().parent.parent
    if not (root / LOCK).is_file():
        raise MissingPrerequisite(
            f"{root} is not a checkout of llama-phase (no {LOCK})", fix="clone the repository and run `make venv` in it"
        )
    return root


def ensure_source(
    root: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    kind: str = "sdist",
    verify: bool = False,
    report: Report = lambda line: None,
    progress: Progress | None = None,
) -> Source:
    """The source tree, fetched if need be. ``kind``: "sdist" or "git"; ``verify``: recompute the digest.

    Raises SourceError when it cannot be had or is not what the lock says, MissingPrerequisite without git.
    """
    lock = Lock.read(root)
    stamp = root / "build" / "source.json"
    if own := environ.get("LLAMA_CPP_DIR"):
        return _own_checkout(Path(own).expanduser(), lock, stamp, report)
    target = root / "llama.cpp"
    if target.exists():
        known = _known_digest(target, stamp, verify)
        if known == lock.tree_sha256 or (kind == "git" and _is_clone(stamp, lock, known)):
            return Source(target, known, known == lock.tree_sha256)
        if not _was_ours(stamp, known):
            raise SourceError(
                f"{target} is not the pinned source: expected tree {lock.tree_sha256}, got {known}",
                fix=f"edits belong in build/src; remove {target} and run `make source`",
            )
        report(f"llama.cpp/ is of another lock; replacing it by {lock.tag}")
    aside = root / ".llama.cpp.part"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if kind == "git":
            _clone(lock, aside)
        else:
            archive = _archive(lock, environ, progress or (lambda label: nullcontext(lambda done, total: None)))
            report(f"unpacking {archive.name}")
            unpack(archive, lock.folder, aside)
        digest = tree_digest(aside)
        if digest != lock.tree_sha256 and kind != "git":
            raise SourceError(
                f"the unpacked tree is not the pinned one: expected {lock.tree_sha256}, got {digest}",
                fix="restore llama.cpp.lock, or see docs/bump.md",
            )
        if digest != lock.tree_sha256:
            report(
                f"warning: the clone of {lock.tag} differs from the pinned archive ({digest[:12]}); "
                "files that only the repository has do that, too"
            )
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
    except OSError as error:
        raise SourceError(f"cannot write {target}: {error.strerror}", fix="free some disk space, run again") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _stamp(target, stamp, digest, kind, lock)
    return Source(target, digest, digest == lock.tree_sha256)


def _archive(lock: Lock, environ: Mapping[str, str], progress: Progress) -> Path:
    from llama_phase import download  # a server that is only started needs no index

    if given := environ.get("LLAMA_PHASE_SDIST"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise SourceError(f"LLAMA_PHASE_SDIST names {path}, which is not a file", fix=f"point it to {lock.file}")
        download.verify(path, lock.sha256, str(path), remove=False)
        return path
    folder = download.cache_folder()
    if (cached := folder / lock.file).is_file() and download.sha256_file(cached) == lock.sha256:
        return cached
    _, url, _ = download.index_file(lock.name, lock.version, environ, file_name=lock.file)
    with progress(lock.file) as advance:
        return download.fetch(url, lock.file, lock.sha256, folder=folder, environ=environ, progress=advance)


def unpack(archive: Path, folder: str, target: Path) -> None:
    """Unpack ``<top>/<folder>/`` of a tar file to ``target``, which must not exist. Raises SourceError.

    Only plain files below the folder are accepted: a link, a device or a path that leads outside stops it. Modification
    times are now, since ninja compares them with objects built from an earlier source.
    """
    count = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if parts[1:2] != (folder,) or member.isdir():
                    continue
                if not member.isfile() or ".." in parts or member.name.startswith("/"):
                    raise SourceError(f"{archive.name} has an unsafe member: {member.name}", fix="do not use it")
                path = target.joinpath(*parts[2:])
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                with content, path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
                count += 1
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(f"{archive} cannot be unpacked: {error}", fix="remove it and run again") from None
    if not count:
        raise SourceError(f"{archive} has no folder {folder}", fix="check [sdist] in llama.cpp.lock")


def _clone(lock: Lock, target: Path) -> None:
    url = lock.repository if "://" in lock.repository else f"https://github.com/{lock.repository}.git"
    clone = ["clone", "--depth", "1", "--branch", lock.tag, url, str(target)]
    command = ["git", "-c", "advice.detachedHead=false", *clone]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise MissingPrerequisite("git is not installed", fix="install git, or use the default source") from None
    if done.returncode:
        raise SourceError(
            f"git could not clone {url} at {lock.tag}: {done.stderr.strip().splitlines()[-1:]}",
            fix="check the network, or use the default source (without `--source git`)",
        )


def _own_checkout(path: Path, lock: Lock, stamp: Path, report: Report) -> Source:
    if not (path / "CMakeLists.txt").is_file():
        raise SourceError(
            f"LLAMA_CPP_DIR names {path}, which is not a llama.cpp checkout (no CMakeLists.txt)",
            fix="correct it, or unset it to use the pinned source",
        )
    path = path.resolve()
    own_stamp = stamp.with_name("source-own.json")
    digest = _known_digest(path, own_stamp, False)
    _stamp(path, own_stamp, digest, "own", lock)
    if digest != lock.tree_sha256:
        report(
            f"warning: LLAMA_CPP_DIR={path} is not the pinned {lock.tag} (tree {digest[:12]}, lock "
            f"{lock.tree_sha256[:12]}): patches may not apply and results may differ"
        )
    return Source(path, digest, digest == lock.tree_sha256)


def _read_stamp(stamp: Path) -> dict[str, str]:
    try:
        data = json.loads(stamp.read_text())
        return data if isinstance(data, dict) else {}
    except (OSError, ValueError):
        return {}


def _known_digest(tree: Path, stamp: Path, verify: bool) -> str:
    saved = _read_stamp(stamp)
    current = fingerprint(tree)
    if not verify and saved.get("path") == str(tree) and saved.get("fingerprint") == current:
        return saved["tree_sha256"]
    digest = tree_digest(tree)
    if saved.get("tree_sha256") in (None, digest):  # else keep the record of what was put there
        _write_stamp(stamp, saved | {"path": str(tree), "fingerprint": current, "tree_sha256": digest})
    return digest


def _was_ours(stamp: Path, digest: str) -> bool:
    """The tree holds exactly what an earlier run put there, so nothing of the user's is lost by replacing it."""
    saved = _read_stamp(stamp)
    return "kind" in saved and saved.get("tree_sha256") == digest


def _is_clone(stamp: Path, lock: Lock, digest: str) -> bool:
    saved = _read_stamp(stamp)
    return (saved.get("kind"), saved.get("tag"), saved.get("tree_sha256")) == ("git", lock.tag, digest)


def _stamp(tree: Path, stamp: Path, digest: str, kind: str, lock: Lock) -> None:
    _write_stamp(
        stamp,
        {"path": str(tree), "fingerprint": fingerprint(tree), "tree_sha256": digest, "kind": kind, "tag": lock.tag},
    )


def _write_stamp(stamp: Path, saved: Mapping[str, str]) -> None:
    write_atomically(stamp, (json.dumps(dict(saved), indent=1) + "\n").encode())
