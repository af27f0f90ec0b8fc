"""One patch of the queue: a header that says why, then a git-style diff in one fixed form.

    Reason: why upstream alone does not do        Drop-when: what makes the patch unnecessary
    Seam: the upstream place it touches           Budget: N reason   (optional: more than 20 added lines)
    Module: files of engine/ it calls             Test: the test that fails without it

A value goes on over the following indented lines. Diffs have three lines of context and no hashes or times, so that the
same edit always gives the same bytes. ``git`` applies and makes them, shielded from the user's configuration and from
the repository around the build folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llama_phase.errors import MissingPrerequisite, PatchError

FIELDS = ("Reason", "Seam", "Module", "Test", "Drop-when")
DEFAULT_BUDGET = 20
_FIELD = re.compile(r"^([A-Z][A-Za-z-]*):[ \t]*(.*)$")
_REFUSED = {
    "new file mode": "adds a file",
    "deleted file mode": "deletes a file",
    "rename from": "renames a file",
    "copy from": "copies a file",
    "old mode": "changes a file's mode",
    "GIT binary patch": "changes a binary file",
}


@dataclass(frozen=True)
class Patch:
    name: str
    header: str  # verbatim, up to the diff
    diff: str

    @classmethod
    def parse(cls, name: str, text: str) -> Patch:
        match = re.search(r"^(diff --git |--- )", text, re.MULTILINE)
        start = match.start() if match else len(text)
        patch = cls(name, text[:start], text[start:])
        for line in patch.diff.splitlines():
            for mark, what in _REFUSED.items():
                if line.startswith(mark):
                    raise PatchError(f"patch {name} {what}", fix="put new code under engine/; a patch only edits files")
            if line in ("--- /dev/null", "+++ /dev/null"):
                raise PatchError(f"patch {name} adds or deletes a file", fix="put new code under engine/")
        return patch

    @property
    def text(self) -> str:
        return self.header + self.diff

    @property
    def fields(self) -> dict[str, str]:
        found: dict[str, str] = {}
        key = ""
        for line in self.header.splitlines():
            match = _FIELD.match(line)
            if match:
                key = match[1]
                found[key] = match[2].strip()
            elif key and line[:1] in " \t" and line.strip():
                found[key] += " " + line.strip()
            else:
                key = ""
        return found

    @property
    def files(self) -> list[str]:
        """Upstream paths the diff touches, in its order."""
        return re.findall(r"^\+\+\+ b/([^\t\n]+)", self.diff, re.MULTILINE)

    @property
    def added_lines(self) -> int:
        return sum(1 for line in self.diff.splitlines() if line.startswith("+") and not line.startswith("+++ "))

    @property
    def budget(self) -> int:
        number = re.match(r"(\d+)\s+\S", self.fields.get("Budget", ""))
        return int(number[1]) if number else DEFAULT_BUDGET


def new_header() -> str:
    return "".join(f"{name}:\n" for name in FIELDS) + "\n"


def git_environment(ceiling: Path) -> dict[str, str]:
    """No repository, no user configuration, English messages: what git prints and writes depends on its input alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "HOME": os.devnull,
        "XDG_CONFIG_HOME": os.devnull,
        "LC_ALL": "C",
    }


def run_git(arguments: list[str], cwd: Path, *, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=cwd,
            env=git_environment(cwd.parent),
            input=stdin,
            text=True,
            errors="surrogateescape",
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise MissingPrerequisite("git is not installed", fix="install git") from None


@dataclass(frozen=True)
class Applied:
    """Patched contents by path, and the hunks that matched only at another line than the diff says."""

    contents: dict[str, bytes]
    offsets: list[str]


def apply_patch(patch: Patch, base: Path) -> Applied:
    """Patched contents of the files of ``base`` that ``patch`` touches; ``base`` is not written to.

    Raises PatchError naming patch, file and hunk. No fuzz: context must match exactly; offsets are reported.
    """
    with tempfile.TemporaryDirectory(prefix="llama-phase-patch-") as folder:
        work = Path(folder, "tree")
        work.mkdir()
        for path in patch.files:
            if not (base / path).is_file():
                raise PatchError(
                    f"patch {patch.name} edits {path}, which is not in {base}",
                    fix="see docs/bump.md if upstream moved it; new code belongs in engine/",
                )
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes((base / path).read_bytes())
        command = ["apply", "--verbose", "--whitespace=nowarn", "-p1"]
        done = run_git([*command, "-"], work, stdin=patch.diff)
        if done.returncode:
            again = run_git([*command, "--reject", "-"], work, stdin=patch.diff)  # names the hunks
            raise _apply_error(patch, again.stderr or done.stderr)
        contents = {path: (work / path).read_bytes() for path in patch.files}
    return Applied(contents, _offsets(done.stderr))


def _offsets(report: str) -> list[str]:
    found, current = [], ""
    for line in report.splitlines():
        if match := re.match(r"(?:Checking|Applied) patch (\S+?)(?:\.\.\.| cleanly\.)$", line):
            current = match[1]
        elif match := re.match(r"Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)", line):
            found.append(f"{current} hunk {match[1]}: at line {match[2]}, {match[3]} lines off")
    return sorted(set(found))


def _apply_error(patch: Patch, report: str) -> PatchError:
    places, current = [], ""
    for line in report.splitlines():
        if match := re.match(r"Applying patch (\S+) with \d+ rejects?", line):
            current = match[1]
        elif match := re.match(r"Rejected hunk #(\d+)", line):
            places.append(f"{current} hunk {match[1]} ({_hunk_line(patch.diff, current, int(match[1]))})")
    where = "; ".join(places) or next((x[7:] for x in report.splitlines() if x.startswith("error: ")), report.strip())
    return PatchError(
        f"patch {patch.name} does not apply: {where}",
        fix=f"edit build/src by hand, then `make export`; or correct patches/{patch.name}.patch",
    )


def _hunk_line(diff: str, path: str, number: int) -> str:
    section = diff.partition(f"+++ b/{path}\n")[2].partition("\ndiff --git ")[0]
    hunks = re.findall(r"^@@ .*$", section, re.MULTILINE)
    return hunks[number - 1] if number <= len(hunks) else "unknown line"


def make_diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """Diff of the files whose contents differ, in path order, in the fixed form; empty when none does."""
    parts = []
    with tempfile.TemporaryDirectory(prefix="llama-phase-diff-") as folder:
        work = Path(folder, "tree")
        for path in sorted(before):
            if before[path] == after[path]:
                continue
            for side, content in (("a", before[path]), ("b", after[path])):
                target = work / side / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            done = run_git(
                [
                    "diff",
                    "--no-index",
                    "--no-color",
                    "--no-ext-diff",
                    "--no-textconv",
                    "--unified=3",
                    "--diff-algorithm=myers",
                    "--no-prefix",
                    "--",
                    f"a/{path}",
                    f"b/{path}",
                ],
                work,
            )
            if done.returncode != 1 or "Binary files" in done.stdout:
                raise PatchError(
                    f"no text diff can be made of {path}: {(done.stderr or done.stdout).strip()}",
                    fix="only text files can be patched",
                )
            parts.append(re.sub(r"^index .*\n", "", done.stdout, count=1, flags=re.MULTILINE))
    return "".join(parts)
