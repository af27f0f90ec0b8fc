"""The patch queue: patches/series and patches/<name>.patch, applied to the pristine source in build/src.

Work model: edit build/src, compile, export. A file belongs to exactly one patch (one seam per file), so patches do not
depend on each other and an edit can be exported to the patch that owns its file without asking.
Order of a run: all patches are applied in memory first; build/src is written only when all of them apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from llama_phase.errors import PatchError
from llama_phase.patch_file import FIELDS, Patch, apply_patch, make_diff, new_header
from llama_phase.tree import Difference, Mirror, Outcome, sha256_bytes, write_atomically

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass
class ExportResult:
    rewritten: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


class PatchQueue:
    """The queue of one checkout. ``pristine`` is read only; ``source`` is the patched mirror."""

    def __init__(self, root: Path, pristine: Path, source: Path | None = None, *, pristine_id: str = ""):
        self.root, self.pristine = root, pristine
        self.source = source or root / "build" / "src"
        self.record = self.source.with_name(self.source.name + ".json")
        self.pristine_id = pristine_id or str(pristine)

    @property
    def folder(self) -> Path:
        return self.root / "patches"

    def series(self) -> list[str]:
        """Patch names in order; raises PatchError for a malformed or repeated name."""
        names: list[str] = []
        try:
            lines = (self.folder / "series").read_text().splitlines()
        except FileNotFoundError:
            lines = []
        for number, line in enumerate(lines, 1):
            name = line.partition("#")[0].strip()
            if not name:
                continue
            if not _NAME.fullmatch(name) or name in names:
                raise PatchError(
                    f"patches/series line {number}: {name!r} is "
                    + ("listed twice" if name in names else "not a patch name"),
                    fix="names are lower-case letters, digits and dashes, without .patch",
                )
            names.append(name)
        return names

    def load(self) -> list[Patch]:
        """The patches in order; raises PatchError for a missing one and for a file that two patches touch."""
        patches, owner = [], {}
        for name in self.series():
            path = self.folder / f"{name}.patch"
            if not path.is_file():
                raise PatchError(
                    f"patches/series lists {name}, but patches/{name}.patch does not exist",
                    fix="restore the file or remove the line",
                )
            patch = Patch.parse(name, path.read_text(errors="surrogateescape"))
            for file in patch.files:
                if file in owner:
                    raise PatchError(
                        f"patches {owner[file]} and {name} both touch {file}",
                        fix="a file belongs to one patch: merge the two, or move one of the edits",
                    )
                owner[file] = name
            patches.append(patch)
        return patches

    def digest(self, patches: Iterable[Patch] | None = None) -> str:
        """Digest of what the queue does: diffs in order. Header text does not count."""
        listed = self.load() if patches is None else patches
        return sha256_bytes("\0".join(p.diff for p in listed).encode(errors="surrogateescape"))

    def _mirror(self) -> Mirror:
        return Mirror.load(self.pristine, self.source, self.record)

    def difference(self) -> Difference:
        """Edits in build/src that are not in the patches (as of the last prepare or export), or whose patch is gone."""
        return self._difference(self._mirror(), self.load())

    def _difference(self, mirror: Mirror, patches: Iterable[Patch]) -> Difference:
        found = mirror.differing()
        if mirror.base_id == self.pristine_id:
            owned = {file for patch in patches for file in patch.files}
            found.edited = sorted({*found.edited, *mirror.unlike_base(owned)})
        return found

    def prepare(self, *, discard: bool = False, allow_offsets: bool = False, skip: Iterable[str] = ()) -> Outcome:
        """Bring build/src to pristine plus patches, writing only files whose content changes.

        ``skip`` leaves patches out, to be made again by hand and exported: until then a plain prepare fails.
        Raises PatchError when a patch does not apply, or when an edit that was not exported would be lost.
        """
        patches, mirror = self.load(), self._mirror()
        if unknown := set(skip) - {patch.name for patch in patches}:
            raise PatchError(f"no patch is named {', '.join(sorted(unknown))}", fix="see patches/series")
        digest = self.digest(patches) + "".join(f"-{name}" for name in sorted(skip))
        found = self._difference(mirror, patches) if mirror.recorded else Difference([], [], [], [])
        for path in set(found.edited) - mirror.written.keys():
            mirror.stats.pop(path, None)  # what it was recorded with is an edit
        same = mirror.recorded and (mirror.base_id, mirror.overlay_id) == (self.pristine_id, digest)
        if same and not discard and not found.missing and not found.stale:
            return Outcome(edited=found.edited + found.extra)
        overlay: dict[str, bytes] = {}
        for patch in patches:
            if patch.name in skip:
                continue
            applied = apply_patch(patch, self.pristine)
            if applied.offsets and not allow_offsets:
                raise PatchError(
                    f"patch {patch.name} applies only with an offset: {'; '.join(applied.offsets)}",
                    fix="`tools/patchq.py prepare --allow-offsets`, look at it, then `make export`",
                )
            overlay |= applied.contents
        outcome = mirror.apply(self.pristine_id, digest, overlay, discard=discard)
        if outcome.conflicts:
            raise PatchError(
                f"edits in {self.source} would be lost: {', '.join(outcome.conflicts)}",
                fix="`make export` saves them; `tools/patchq.py prepare --discard` drops them",
            )
        return outcome

    def export(self, *, into: str = "", force: bool = False) -> ExportResult:
        """Rewrite the patches from build/src. Edited files without a patch go to patch ``into`` (made if it is new).

        Raises PatchError when build/src has new or missing files, when the patches changed since the last prepare
        (``force``: build/src wins), when an edited file has no patch, and when a patch would become empty.
        """
        patches, mirror = self.load(), self._mirror()
        if patches and not force and mirror.overlay_id.partition("-")[0] != self.digest(patches):
            raise PatchError(
                "the patches changed since build/src was prepared from them",
                fix="`make prepare` first; `tools/patchq.py export --force` lets build/src win",
            )
        found = self._difference(mirror, patches)
        if found.extra or found.missing:
            what = ", ".join([*(f"{p} (new)" for p in found.extra), *(f"{p} (deleted)" for p in found.missing)])
            raise PatchError(
                f"a patch only edits existing files: {what}",
                fix="move new files to engine/ and restore deleted ones (`make prepare`)",
            )
        owned = {file: p.name for p in patches for file in p.files}
        loose = [file for file in found.edited if file not in owned]
        if loose and not into:
            raise PatchError(
                f"edited files that belong to no patch: {', '.join(loose)}",
                fix="`make export INTO=<patch>` adds them to that patch, or makes it",
            )
        if into and not _NAME.fullmatch(into):
            raise PatchError(f"{into!r} is not a patch name", fix="lower-case letters, digits and dashes")
        if loose and into not in [p.name for p in patches]:
            patches.append(Patch(into, new_header(), ""))
        renewed = [self._renew(p, [*p.files, *(loose if p.name == into else [])]) for p in patches]
        result = ExportResult()
        for old, new in zip(patches, renewed, strict=True):
            path = self.folder / f"{new.name}.patch"
            if new.text == old.text and path.is_file():
                result.unchanged.append(new.name)
                continue
            write_atomically(path, new.text.encode(errors="surrogateescape"))
            result.rewritten.append(new.name)
        self._append_to_series([p.name for p in renewed])
        contents = {file: sha256_bytes((self.source / file).read_bytes()) for p in renewed for file in p.files}
        mirror.save(self.pristine_id, self.digest(renewed), contents, set())
        return result

    def _renew(self, patch: Patch, files: list[str]) -> Patch:
        before = {file: (self.pristine / file).read_bytes() for file in files}
        diff = make_diff(before, {file: (self.source / file).read_bytes() for file in files})
        if not diff:
            raise PatchError(
                f"patch {patch.name} would be empty: build/src has no edit of its files",
                fix=f"if it is no longer needed remove patches/{patch.name}.patch and its line in series",
            )
        return Patch(patch.name, patch.header, diff)

    def _append_to_series(self, names: list[str]) -> None:
        added = [name for name in names if name not in self.series()]
        if added:
            path = self.folder / "series"
            text = path.read_text() if path.is_file() else ""
            write_atomically(path, (text + "".join(f"{name}\n" for name in added)).encode())

    def check(self) -> list[str]:
        """Every rule the queue breaks, one line each; empty when it is in order. Reads only, build/src not needed."""
        try:
            patches = self.load()
        except PatchError as error:
            return [str(error)]
        listed = {f"{patch.name}.patch" for patch in patches}
        problems = [
            f"patches/{p.name} is not in patches/series"
            for p in sorted(self.folder.glob("*.patch"))
            if p.name not in listed
        ]
        for patch in patches:
            problems += [f"patch {patch.name}: {problem}" for problem in self._check_patch(patch)]
        return problems

    def _check_patch(self, patch: Patch) -> list[str]:
        fields = patch.fields
        problems = [f"header field {name} is missing or empty" for name in FIELDS if not fields.get(name)]
        for name in ("Module", "Test"):
            for path in re.split(r"[,\s]+", fields.get(name, "")):
                if path and not (self.root / path.partition("::")[0]).exists():
                    problems.append(f"{name} names {path}, which does not exist")
        if "Budget" in fields and not re.match(r"\d+\s+\S", fields["Budget"]):
            problems.append("Budget needs a number and a reason")
        if patch.added_lines > patch.budget:
            problems.append(f"adds {patch.added_lines} lines, budget {patch.budget}: move code to engine/")
        if not patch.files:
            return [*problems, "has no diff"]
        try:
            applied = apply_patch(patch, self.pristine)
        except PatchError as error:
            return [*problems, str(error)]
        problems += [f"applies only with an offset: {offset}" for offset in applied.offsets]
        before = {file: (self.pristine / file).read_bytes() for file in patch.files}
        if make_diff(before, applied.contents) != patch.diff:
            problems.append("exporting it again gives another text: `make prepare export`")
        return problems

    def trial(self, tree: Path) -> dict[str, str]:
        """How each patch fares on another upstream tree: "applies", "applies with an offset: ...", or the failure."""
        report = {}
        for patch in self.load():
            try:
                offsets = apply_patch(patch, tree).offsets
                report[patch.name] = f"applies with an offset: {'; '.join(offsets)}" if offsets else "applies"
            except PatchError as error:
                report[patch.name] = str(error)
        return report
