"""The demo's pretrained model and prompts. A small stand-in package plays the 253 MB one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llama_phase import demo_models
from llama_phase.demo_models import PROMPT_TEXTS, gemma_path, long_text
from llama_phase.errors import MissingPrerequisite, ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 16
ASSEMBLE = """
from pathlib import Path
def assemble(output_path, overwrite=False):
    target = Path(output_path)
    if target.exists() and not overwrite:
        raise FileExistsError(target)
    target.write_bytes(b"GGUF" + bytes(range(256)) * 16)
    {then}
    return target
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(then): installs a stand-in that writes CONTENT, then does ``then``."""
    name = "gemma_stand_in"
    monkeypatch.setattr(demo_models, "GEMMA_PACKAGE", name)
    monkeypatch.setattr(demo_models, "GEMMA_BYTES", len(CONTENT))

    def install(then: str = "") -> None:
        data = tmp_path / "site" / name / "data"
        data.mkdir(parents=True)
        (data / "GEMMA_TERMS.html").write_text("the terms")
        (data.parent / "__init__.py").write_text(ASSEMBLE.format(then=then))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield install
    sys.modules.pop(name, None)


def test_assembled_once_and_terms_shown_once(package, tmp_path):
    package()
    shown: list[str] = []
    path = gemma_path(tmp_path / "models", show=shown.append)
    assert path.read_bytes() == CONTENT
    made_at = path.stat().st_mtime_ns
    assert gemma_path(tmp_path / "models", show=shown.append) == path
    assert path.stat().st_mtime_ns == made_at
    assert len(shown) == 1
    assert Path(shown[0].rpartition(": ")[2]).read_text() == "the terms"
    assert sorted(p.name for p in path.parent.iterdir()) == ["GEMMA_TERMS.html", path.name]


def test_incomplete_file_is_made_again(package, tmp_path):
    package()
    path = tmp_path / demo_models.GEMMA_FILE
    path.write_bytes(CONTENT[:100])
    assert gemma_path(tmp_path, show=lambda _: None).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("then", "raised"),
    [
        ("raise ValueError('sha256 did not match')", ModelError),
        ("raise OSError(28, 'No space left on device')", MissingPrerequisite),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
    ],
)
def test_failed_assembly_leaves_nothing(package, tmp_path, then, raised):
    package(then)
    with pytest.raises(raised):
        gemma_path(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_missing_extra_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_models, "GEMMA_PACKAGE", "no_such_package_here")
    with pytest.raises(MissingPrerequisite) as caught:
        gemma_path(tmp_path / "models")
    assert "llama-phase[demo]" in caught.value.fix
    assert not list((tmp_path / "models").iterdir())


def test_model_in_place_needs_no_package(package, tmp_path):
    path = tmp_path / demo_models.GEMMA_FILE
    path.write_bytes(CONTENT)
    assert gemma_path(tmp_path) == path


@pytest.mark.parametrize("n_words", [1, 2, 100, 12_000, 32_791, 32_792, 80_000])
def test_long_text_has_exactly_the_asked_words(n_words):
    assert len(long_text(n_words).split()) == n_words


def test_long_text_is_a_prefix_of_a_longer_one():
    assert long_text(50_000).startswith(long_text(40_000))


def test_long_text_repeats_no_paragraph_before_the_source_runs_out():
    paragraphs = [p for p in long_text(30_000).split("\n\n") if len(p.split()) > 20]
    assert len(set(paragraphs)) == len(paragraphs)


def test_repeats_come_in_another_order_under_new_headings():
    paragraphs = long_text(300_000).split("\n\n")
    headings = [p for p in paragraphs if p.startswith("Chapter ")]
    assert headings == [f"Chapter {i + 1}" for i in range(len(headings))] and len(headings) > 33
    after = [paragraphs[i + 1] for i, p in enumerate(paragraphs[:-1]) if p.startswith("Chapter ")]
    rounds = [tuple(after[i : i + 11]) for i in range(0, len(after) - 10, 11)]
    assert len(set(rounds)) == len(rounds)
    assert all(set(r) == set(rounds[0]) for r in rounds)


def test_texts_of_different_chapters_differ_at_once():
    starts = {long_text(12, first_chapter=i) for i in range(1, 12)}
    assert len(starts) == 11


@pytest.mark.parametrize("bad", [{"n_words": 0}, {"n_words": 5, "first_chapter": 12}])
def test_bad_request_for_text_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        long_text(**bad)


def test_prompts_are_text_to_go_on_with():
    assert len(PROMPT_TEXTS) >= 5
    for text in PROMPT_TEXTS.values():
        assert len(text.split()) >= 10
        assert not text[-1].isspace()
