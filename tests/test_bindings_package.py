"""What is handed on: type stubs, the wheel, the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from engine_server import ROOT, clean_environment

pytestmark = pytest.mark.engine


def test_stubs_are_those_of_the_module(bindings: Path, tmp_path: Path) -> None:
    """`tools/bindings.py --stubs` writes them; signatures, docstrings and names."""
    command = [sys.executable, str(ROOT / "tools/bindings.py"), "--stubs", str(tmp_path)]
    done = subprocess.run(command, env=clean_environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "_engine.pyi").read_text() == (ROOT / "llama_phase/_engine.pyi").read_text()


SCRIPT = """
import json, os, sys
import llama_phase
os.environ["LLAMA_CPP_LIB_PATH"] = str(llama_phase.library_path())
tokens = list(range(100, 700))
with llama_phase.Engine(sys.argv[1], ctx=2048, ubatch=126, batch=512, prefill_ubatch=512, threads=1) as engine:
    ours, entered = engine.generate(tokens, 8, ignore_eos=True).tokens, engine.stats().n_entered
with llama_phase.environment(prefill_mode="transaction", prefill_ubatch=512):
    from llama_cpp import Llama
    llm = Llama(sys.argv[1], n_ctx=2048, n_batch=512, n_ubatch=126, n_threads=1, n_threads_batch=1, verbose=False)
theirs = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(8))]
mapped = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libllama" in line or "libggml" in line})
print(json.dumps([ours, theirs, entered, llama_phase.attach(llm).stats().n_entered, llama_phase.__file__, mapped]))
"""


def test_the_wheel_alone_generates(bindings: Path, model_path, tmp_path: Path) -> None:
    """In a new environment without compiler or checkout; what it depends on is taken from this one. Its libraries serve
    llama-cpp-python, too, and are loaded once."""
    built = subprocess.run(
        [sys.executable, str(ROOT / "tools/bindings.py"), "--wheel", "--backend", "cpu"],
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    wheel = max((ROOT / "dist").glob("llama_phase-*.whl"), key=os.path.getmtime)
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = tmp_path / "venv/bin/python"
    environ = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, env=environ, check=True, capture_output=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    command = [python, "-c", SCRIPT, model_path("qwen3moe").resolve()]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours, theirs, entered, entered_too, package, mapped = json.loads(done.stdout.splitlines()[-1])
    assert ours == theirs and len(ours) == 8
    assert entered == entered_too == 1
    assert Path(package).is_relative_to(tmp_path)
    assert len(mapped) >= 4 and all(Path(library).is_relative_to(tmp_path.resolve()) for library in mapped)


def test_the_plain_package_needs_no_compiler(tmp_path: Path) -> None:
    """`pip install .` of a checkout: pure Python, nothing compiled in, no cmake asked for."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    done = subprocess.run([*command, "-w", tmp_path], env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")


SLOTS = ("phases.ipynb",)
EXAMPLES = sorted(path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(bindings: Path, model_path, tmp_path: Path, name: str) -> None:
    """As they are, on the tiny model; a notebook's cells in turn."""
    done = example(name, tmp_path, model_path("qwen3moe"))
    assert done.returncode == 0, done.stderr
    assert "entered" in done.stdout + done.stderr and "left" in done.stdout + done.stderr
    assert name not in SLOTS or re.search(r"[1-9]\d* looked up, [1-9]\d* copied", done.stdout), "there are slots to see"


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_say_what_is_missing(bindings: Path, tmp_path: Path, name: str) -> None:
    """An argument, the model's file, the file of a prompt: a sentence, never a traceback."""
    absent = tmp_path / "none.gguf"
    for words, said in (([], "usage: "), ([absent], "fix: "), (["m.gguf", absent], "error: ")):
        if name.endswith(".ipynb"):
            words, said = [absent], "fix: "
        done = example(name, tmp_path, *words)
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_use_a_gpu_where_there_is_one(name: str) -> None:
    """Nothing is offloaded by default in either binding."""
    assert re.search(r"gpu_layers\W+-1\b", (ROOT / "examples" / name).read_text())


def example(name: str, folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one; the model of a notebook is the first word."""
    path = ROOT / "examples" / name
    environ = clean_environment({"PYTHONPATH": str(ROOT)} | ({"EXAMPLE_MODEL": str(words[0])} if words else {}))
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] for cell in cells), "saved with outputs"
        path = folder / "cells.py"
        path.write_text("\n".join("".join(cell["source"]) for cell in cells))
    command = [sys.executable, path, *words]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)
