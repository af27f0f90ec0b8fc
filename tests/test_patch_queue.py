"""The patch queue on small trees: what is written, what is protected, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_phase.errors import PatchError
from llama_phase.patch_file import FIELDS, Patch, apply_patch, make_diff
from llama_phase.patch_queue import PatchQueue

HEADER = (
    "Reason: the context must know when a prompt\n  begins\nSeam: src/a.cpp\nModule: engine/phase.cpp\n"
    "Test: tests/test_x.py::test_y\nDrop-when: upstream has it\n\n"
)


def numbered(count: int, **changed: str) -> bytes:
    return "".join(changed.get(f"l{n}", f"line {n}") + "\n" for n in range(1, count + 1)).encode()


@pytest.fixture
def queue(tmp_path: Path) -> PatchQueue:
    root = tmp_path / "check out"
    for path, content in {
        "llama.cpp/src/a.cpp": numbered(60),
        "llama.cpp/src/b.cpp": numbered(30),
        "llama.cpp/CMakeLists.txt": b"project(x)\n",
        "llama.cpp/convert.py": b"#!/usr/bin/env python3\n",
        "engine/phase.cpp": b"",
        "tests/test_x.py": b"",
        "patches/series": b"# order matters\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / "llama.cpp/convert.py").chmod(0o755)
    return PatchQueue(root, root / "llama.cpp", pristine_id="v1")


def edit(queue: PatchQueue, path: str, **changed: str) -> None:
    count = len((queue.pristine / path).read_bytes().splitlines())
    (queue.source / path).write_bytes(numbered(count, **changed))


def add_patch(queue: PatchQueue, name: str, path: str, *, header: str = HEADER, **changed: str) -> Path:
    before = (queue.pristine / path).read_bytes()
    after = numbered(len(before.splitlines()), **changed)
    file = queue.folder / f"{name}.patch"
    file.write_text(header + make_diff({path: before}, {path: after}))
    with (queue.folder / "series").open("a") as series:
        series.write(f"{name}\n")
    return file


def age(folder: Path) -> dict[str, int]:
    """Set every file's time far back, so that a rewrite shows."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(10**18, 10**18))
    return times(folder)


def times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_edit_export_prepare_round_trip_is_stable(queue):
    queue.prepare()
    edit(queue, "src/a.cpp", l10="ten", l50="fifty")
    assert queue.export(into="context").rewritten == ["context"]
    text = (queue.folder / "context.patch").read_text()
    assert "index " not in text and "+ten" in text and text.count("@@ -") == 2
    assert (queue.folder / "series").read_text() == "# order matters\ncontext\n"
    assert queue.export().rewritten == []
    other = PatchQueue(queue.root, queue.pristine, queue.root / "elsewhere/src", pristine_id="v1")
    other.prepare()
    assert (other.source / "src/a.cpp").read_bytes() == (queue.source / "src/a.cpp").read_bytes()
    assert other.export().rewritten == [] and (queue.folder / "context.patch").read_text() == text


def test_prepare_touches_only_files_whose_content_changes(queue):
    queue.prepare()
    before = age(queue.source)
    add_patch(queue, "one", "src/a.cpp", l5="five")
    assert queue.prepare().written == ["src/a.cpp"]
    changed = {p for p, t in times(queue.source).items() if t != before[p]}
    assert changed == {"src/a.cpp"}
    before = age(queue.source)
    assert queue.prepare().written == [] and times(queue.source) == before


def test_prepare_adopts_a_plain_copy_without_touching_it(queue):
    queue.prepare()
    queue.record.unlink()
    before = age(queue.source)
    assert queue.prepare().written == [] and times(queue.source) == before


def test_execute_bits_survive(queue):
    queue.prepare()
    assert os.access(queue.source / "convert.py", os.X_OK)


def test_new_upstream_replaces_changed_and_removes_gone_files(queue):
    queue.prepare()
    (queue.pristine / "src/b.cpp").write_bytes(numbered(31))
    (queue.pristine / "convert.py").unlink()
    outcome = PatchQueue(queue.root, queue.pristine, pristine_id="v2").prepare()
    assert outcome.written == ["src/b.cpp"] and outcome.removed == ["convert.py"]


def test_a_failing_patch_names_patch_file_and_hunk_and_writes_nothing(queue):
    queue.prepare()
    add_patch(queue, "good", "src/b.cpp", l5="five")
    path = add_patch(queue, "broken", "src/a.cpp", l10="ten", l50="fifty")
    path.write_text(path.read_text().replace(" line 51", " line fifty-one"))
    before = age(queue.source)
    with pytest.raises(PatchError, match=r"broken does not apply: src/a\.cpp hunk 2 \(@@ -47,7 \+47,7 @@") as caught:
        queue.prepare()
    assert "make export" in caught.value.fix and times(queue.source) == before
    assert any("hunk 2" in problem for problem in queue.check())


def test_context_must_match_exactly_and_at_its_line(queue):
    path = add_patch(queue, "shifted", "src/a.cpp", l30="thirty")
    path.write_text(path.read_text().replace("@@ -27,7 +27,7 @@", "@@ -25,7 +25,7 @@"))
    with pytest.raises(PatchError, match=r"offset.*src/a.cpp hunk 1: at line 27, 2 lines off"):
        queue.prepare()
    assert any("offset" in problem for problem in queue.check())
    queue.prepare(allow_offsets=True)
    assert b"thirty" in (queue.source / "src/a.cpp").read_bytes()
    queue.export()
    assert not queue.check()


def test_a_skipped_patch_is_made_again_by_hand(queue):
    path = add_patch(queue, "moved", "src/a.cpp", l10="ten")
    path.write_text(path.read_text().replace(" line 11", " line eleven"))
    queue.prepare(skip=["moved"])
    with pytest.raises(PatchError, match="does not apply"):
        queue.prepare()
    edit(queue, "src/a.cpp", l10="ten, by hand")
    queue.export()
    assert path.read_text().startswith(HEADER) and "+ten, by hand" in path.read_text()
    assert queue.check() == [] and queue.prepare().edited == []


def test_edits_not_exported_are_never_overwritten(queue):
    patch = add_patch(queue, "one", "src/a.cpp", l5="five")
    queue.prepare()
    edit(queue, "src/a.cpp", l5="five", l40="my work")
    assert queue.prepare().edited == ["src/a.cpp"]  # nothing to do there: only told
    patch.write_text(patch.read_text().replace("+five", "+FIVE"))
    with pytest.raises(PatchError, match=r"edits .* would be lost: src/a\.cpp"):
        queue.prepare()
    assert b"my work" in (queue.source / "src/a.cpp").read_bytes()
    queue.prepare(discard=True)
    assert (queue.source / "src/a.cpp").read_bytes() == numbered(60, l5="FIVE")


def test_edits_to_unpatched_files_survive_other_patches(queue):
    queue.prepare()
    edit(queue, "src/b.cpp", l7="seven")
    add_patch(queue, "one", "src/a.cpp", l5="five")
    outcome = queue.prepare()
    assert outcome.written == ["src/a.cpp"] and outcome.edited == ["src/b.cpp"]
    assert queue.difference().edited == ["src/b.cpp"]
    add_patch(queue, "two", "src/b.cpp", l8="eight")
    with pytest.raises(PatchError, match="would be lost"):
        queue.prepare()


def test_a_patch_edited_by_hand_is_not_overwritten_by_export(queue):
    patch = add_patch(queue, "one", "src/a.cpp", l5="five")
    queue.prepare()
    patch.write_text(patch.read_text().replace("+five", "+5"))
    with pytest.raises(PatchError, match="changed since"):
        queue.export()
    assert queue.export(force=True).rewritten == ["one"]


def test_header_edits_need_no_prepare_and_survive_export(queue):
    patch = add_patch(queue, "one", "src/a.cpp", l5="five")
    queue.prepare()
    digest = queue.digest()
    patch.write_text("Reason: better words\n" + patch.read_text().partition("  begins\n")[2])
    edit(queue, "src/a.cpp", l5="cinq")
    assert queue.digest() == digest
    queue.export()
    assert "better words" in patch.read_text() and "+cinq" in patch.read_text()


def test_new_and_deleted_files_are_refused(queue):
    queue.prepare()
    (queue.source / "src/new.cpp").write_text("x")
    with pytest.raises(PatchError, match=r"src/new\.cpp \(new\)") as caught:
        queue.export()
    assert "engine/" in caught.value.fix
    assert queue.prepare().edited == ["src/new.cpp"] and (queue.source / "src/new.cpp").exists()
    diff = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(PatchError, match="adds"):
        Patch.parse("p", HEADER + diff)


def test_an_edited_file_without_a_patch_needs_a_name(queue):
    queue.prepare()
    edit(queue, "src/b.cpp", l7="seven")
    with pytest.raises(PatchError, match=r"no patch: src/b\.cpp") as caught:
        queue.export()
    assert "INTO=" in caught.value.fix
    queue.export(into="server-hook")
    problems = queue.check()
    assert all(any(field in problem for problem in problems) for field in FIELDS)


def test_export_never_leaves_an_empty_patch(queue):
    add_patch(queue, "one", "src/a.cpp", l5="five")
    queue.prepare()
    (queue.source / "src/a.cpp").write_bytes(numbered(60))
    with pytest.raises(PatchError, match="would be empty"):
        queue.export()
    assert "five" in (queue.folder / "one.patch").read_text()


def delete_patch(queue: PatchQueue, name: str) -> None:
    (queue.folder / f"{name}.patch").unlink()
    series = queue.folder / "series"
    series.write_text(series.read_text().replace(f"{name}\n", ""))


def test_what_a_deleted_patch_edited_is_noticed(queue):
    add_patch(queue, "one", "src/a.cpp", l5="five")
    add_patch(queue, "two", "src/b.cpp", l7="seven")
    queue.prepare()
    delete_patch(queue, "one")
    assert queue.difference().edited == ["src/a.cpp"]
    for left in ("two", ""):
        with pytest.raises(PatchError, match=r"no patch: src/a\.cpp"):
            queue.export(force=True)
        assert queue.series() == [left] * bool(left)
        delete_patch(queue, left) if left else None
    assert queue.prepare().written == ["src/a.cpp", "src/b.cpp"] and not queue.difference()


def test_a_record_that_takes_an_edit_for_pristine_is_not_believed(queue):
    add_patch(queue, "one", "src/a.cpp", l5="five")
    queue.prepare()
    record = json.loads(queue.record.read_text())
    queue.record.write_text(json.dumps(record | {"written": {}}))
    delete_patch(queue, "one")
    assert queue.difference().edited == ["src/a.cpp"]
    assert queue.prepare().edited == ["src/a.cpp"] == queue.prepare().edited  # an edit: only named
    assert queue.prepare(discard=True).written == ["src/a.cpp"] and not queue.difference()


def test_a_file_belongs_to_one_patch(queue):
    add_patch(queue, "one", "src/a.cpp", l5="five")
    add_patch(queue, "two", "src/a.cpp", l50="fifty")
    with pytest.raises(PatchError, match=r"one and two both touch src/a\.cpp"):
        queue.prepare()


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (HEADER.replace("Reason: the context must know when a prompt\n  begins\n", "Reason:\n"), "Reason is missing"),
        (HEADER.replace("Drop-when: upstream has it\n", ""), "Drop-when is missing"),
        (HEADER.replace("engine/phase.cpp", "engine/gone.cpp"), "engine/gone.cpp, which does not exist"),
        (HEADER.replace("tests/test_x.py", "tests/test_gone.py"), "test_gone.py::test_y, which does not exist"),
        (HEADER.replace("Drop-when", "Budget: 30\nDrop-when"), "Budget needs a number and a reason"),
    ],
)
def test_incomplete_headers_are_found(queue, header, problem):
    add_patch(queue, "one", "src/a.cpp", header=header, l5="five")
    assert [p for p in queue.check() if problem in p]


def test_budget_of_added_lines(queue):
    patch = add_patch(queue, "one", "src/a.cpp", l5="\n".join(f"new {n}" for n in range(21)))
    assert ["adds 21 lines, budget 20" in problem for problem in queue.check()] == [True]
    patch.write_text(patch.read_text().replace("Drop-when:", "Budget: 21 a table upstream keeps there\nDrop-when:"))
    assert queue.check() == []


def test_series_and_files_must_agree(queue):
    add_patch(queue, "one", "src/a.cpp", l5="five")
    (queue.folder / "stray.patch").write_text("")
    assert queue.check() == ["patches/stray.patch is not in patches/series"]
    (queue.folder / "one.patch").unlink()
    assert queue.check() == ["patches/series lists one, but patches/one.patch does not exist"]
    (queue.folder / "series").write_text("../one\n")
    assert "not a patch name" in queue.check()[0]


def test_hand_made_diff_that_would_export_differently_is_found(queue):
    patch = add_patch(queue, "one", "src/a.cpp", l5="five")
    patch.write_text(patch.read_text().replace("diff --git a/src/a.cpp b/src/a.cpp\n", ""))
    assert any("another text" in problem for problem in queue.check())


def test_users_git_configuration_does_not_change_the_text(queue, tmp_path, monkeypatch):
    before, after = {"x": numbered(9)}, {"x": numbered(9, l5="five")}
    plain = make_diff(before, after)
    config = tmp_path / "gitconfig"
    config.write_text("[diff]\n noprefix = true\n context = 9\n external = false\n[core]\n autocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert make_diff(before, after) == plain


line = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(line, min_size=1, max_size=30), st.lists(line, min_size=1, max_size=30), st.booleans())
def test_diff_then_apply_gives_the_edit(tmp_path, before, after, newline):
    end = "\n" if newline else ""
    old, new = ("\n".join(lines).encode() + end.encode() for lines in (before, after))
    (tmp_path / "f.txt").write_bytes(old)
    diff = make_diff({"f.txt": old}, {"f.txt": new})
    if not diff:
        assert old == new
        return
    applied = apply_patch(Patch.parse("p", HEADER + diff), tmp_path)
    assert applied.contents == {"f.txt": new} and not applied.offsets
