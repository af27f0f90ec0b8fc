"""The README's commands are the ones the project runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))


def test_ci_runs_the_readmes_test_command():
    assert re.search(r"^make test\b", SHELL, re.MULTILINE)
    assert re.search(r"^\s*(exec )?make\b.*\btest\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("verb", re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
def test_make_verbs_exist(verb):
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"the README says `make {verb}`"


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_serve_takes_the_readmes_flags():
    from llama_phase.settings import Settings, argv

    line = next(line for line in SHELL.splitlines() if "llama-phase serve" in line)
    ours, _, theirs = line.partition(" -- ")
    assert "--slots auto" in ours
    settings = Settings.load(model=Path("model.gguf"), expert_slots="auto", upstream=theirs.split())
    assert {"-ngl", "--cpu-moe", "--no-repack"} <= set(argv(settings))


def test_engine_variables_of_the_readme_are_known():
    from llama_phase.env import registry

    names = set(re.findall(r"LLAMA_PHASE_[A-Z_]+", README))
    assert names and names <= set(registry())


def test_generated_files_are_up_to_date():
    done = subprocess.run([sys.executable, "tools/gen_env.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
