"""File trees: what is in one, its digest, and a mirror of it that rewrites only the files whose content changes.

The mirror (build/src) is where patches are applied and where people edit. A mirrored file may hold three contents:
*base* (the pristine file), *written* (what the last mirror run put there) and *edited* (anything else). Only base and
written are ever overwritten; an edited file stops the run, unless the run does not need to change it. ninja decides by
modification times, so an unchanged file is never touched.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

Stat = tuple[int, int]  # size in bytes, mtime in ns


def scan(root: Path) -> dict[str, os.stat_result]:
    """All files under ``root`` by relative POSIX path, without .git and bytecode. Links are listed as themselves."""
    found: dict[str, os.stat_result] = {}
    pending = [("", str(root))]
    while pending:
        prefix, folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in (".git", "__pycache__"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{prefix}{entry.name}/", entry.path))
                else:
                    found[prefix + entry.name] = entry.stat(follow_symlinks=False)
    return found


def sha256_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tree_digest(root: Path) -> str:
    """Digest of names, owner's execute bits and contents under ``root``; llama.cpp.lock defines the format."""
    lines = []
    for path, info in scan(root).items():
        target = root / path
        content = os.readlink(target).encode() if stat.S_ISLNK(info.st_mode) else target.read_bytes()
        lines.append(f"{path}\0{int(bool(info.st_mode & 0o100))}\0{sha256_bytes(content)}\n".encode())
    return sha256_bytes(b"".join(sorted(lines)))


def fingerprint(root: Path) -> str:
    """Cheap stand-in for ``tree_digest``: changes when a file is added, removed, resized or written to."""
    lines = (f"{path}\0{info.st_size}\0{info.st_mtime_ns}" for path, info in scan(root).items())
    return sha256_bytes("\n".join(sorted(lines)).encode())


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """The file has the old or the new content, whatever interrupts; its modification time is now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".write-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass
class Mirror:
    """A mirror of ``base`` at ``dest`` with some files replaced, and the record of what was written there."""

    base: Path
    dest: Path
    record: Path
    base_id: str = ""
    overlay_id: str = ""
    written: dict[str, str] = field(default_factory=dict)  # path -> sha256, for files that differ from base
    stats: dict[str, Stat] = field(default_factory=dict)  # of files known to hold what was written
    recorded: bool = False

    @classmethod
    def load(cls, base: Path, dest: Path, record: Path) -> Mirror:
        """A missing or unreadable record means that nothing is known about ``dest``: every file is compared."""
        mirror = cls(base, dest, record)
        try:
            saved = json.loads(record.read_text())
            mirror.base_id, mirror.overlay_id, mirror.written = saved["base"], saved["overlay"], saved["written"]
            mirror.stats = {path: (size, mtime) for path, (size, mtime) in saved["stats"].items()}
            mirror.recorded = dest.is_dir()
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return mirror

    def save(self, base_id: str, overlay_id: str, written: Mapping[str, str], edited: set[str]) -> None:
        self.base_id, self.overlay_id, self.written, self.recorded = base_id, overlay_id, dict(written), True
        ours = scan(self.base).keys() - edited
        self.stats = {p: (i.st_size, i.st_mtime_ns) for p, i in scan(self.dest).items() if p in ours}
        state = {"base": base_id, "overlay": overlay_id, "written": self.written, "stats": self.stats}
        write_atomically(self.record, json.dumps(state).encode())

    def differing(self) -> Difference:
        """What in ``dest`` is neither base nor written. Reads only files whose size or time changed."""
        current, names = scan(self.dest), set(scan(self.base))
        edited = []
        for path in sorted(names & current.keys()):
            info = current[path]
            if self.stats.get(path) == (info.st_size, info.st_mtime_ns):
                continue
            content = (self.dest / path).read_bytes()
            known = self.written.get(path) or sha256_bytes((self.base / path).read_bytes())
            if sha256_bytes(content) != known:
                edited.append(path)
        extra = sorted(p for p in current.keys() - names if p not in self.stats)
        return Difference(edited, sorted(names - current.keys()), extra, sorted((current.keys() - names) - set(extra)))

    def unlike_base(self, but: Set[str]) -> list[str]:
        """Files, except ``but``, whose content is not that of base. Reads all of them and believes no record."""
        base, current = scan(self.base), scan(self.dest)
        return sorted(
            path
            for path in (base.keys() & current.keys()) - but
            if stat.S_ISREG(base[path].st_mode) and not filecmp.cmp(self.base / path, self.dest / path, shallow=False)
        )

    def apply(self, base_id: str, overlay_id: str, overlay: Mapping[str, bytes], *, discard: bool = False) -> Outcome:
        """Make ``dest`` equal to base plus ``overlay``; nothing is written when an edited file would be lost.

        Edited files that this run need not change are left alone and named in the outcome.
        """
        if not self.dest.exists():
            return self._create(base_id, overlay_id, overlay)
        base, current = scan(self.base), scan(self.dest)
        writes: dict[str, bytes] = {}
        outcome = Outcome()
        for path, info in base.items():
            known = path in current and self.stats.get(path) == (current[path].st_size, current[path].st_mtime_ns)
            if known and base_id == self.base_id and path not in overlay and path not in self.written:
                continue
            pristine = (self.base / path).read_bytes()
            wanted = overlay.get(path, pristine)
            content = (self.dest / path).read_bytes() if path in current else None
            if content == wanted and bool(current[path].st_mode & 0o100) == bool(info.st_mode & 0o100):
                continue
            ours = (
                content is None
                or known
                or content in (wanted, pristine)
                or (sha256_bytes(content) == self.written.get(path))
            )
            last_wanted = self.written.get(path) or (sha256_bytes(pristine) if base_id == self.base_id else None)
            if ours or discard:
                writes[path] = wanted
            elif last_wanted == sha256_bytes(wanted):
                outcome.edited.append(path)
            else:
                outcome.conflicts.append(path)
        stale = [p for p in current.keys() - base.keys() if p in self.stats or discard]
        if outcome.conflicts:
            return outcome
        for path, content in writes.items():
            write_atomically(self.dest / path, content, base[path].st_mode & 0o777)
        for path in stale:
            (self.dest / path).unlink()
        outcome.written, outcome.removed = sorted(writes), sorted(stale)
        self.save(base_id, overlay_id, {p: sha256_bytes(c) for p, c in overlay.items()}, set(outcome.edited))
        return outcome

    def _create(self, base_id: str, overlay_id: str, overlay: Mapping[str, bytes]) -> Outcome:
        """First run: copy aside and rename, so that an interrupted copy is never taken for somebody's edits."""
        aside = self.dest.with_name(self.dest.name + ".new")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(
            self.base, aside, ignore=shutil.ignore_patterns(".git"), copy_function=shutil.copy, symlinks=True
        )
        for path, content in overlay.items():
            write_atomically(aside / path, content, (self.base / path).stat().st_mode & 0o777)
        os.rename(aside, self.dest)
        self.save(base_id, overlay_id, {p: sha256_bytes(c) for p, c in overlay.items()}, set())
        return Outcome(written=sorted(scan(self.dest)))


@dataclass
class Difference:
    edited: list[str]
    missing: list[str]
    extra: list[str]  # not in base and not ours
    stale: list[str]  # ours, no longer in base

    def __bool__(self) -> bool:
        return bool(self.edited or self.missing or self.extra or self.stale)


@dataclass
class Outcome:
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)  # left as they are
    conflicts: list[str] = field(default_factory=list)  # edited, and the run would overwrite them: nothing was done
