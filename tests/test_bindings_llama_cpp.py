"""llama-cpp-python on our libraries: the same structs, the same tokens as on stock, and our controls."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, ROOT, clean_environment, phase_environment
from struct_layout import layout_in_c, layout_in_python, structs_of

pytestmark = pytest.mark.engine

# One process each, since libraries cannot be unloaded. Prints a line of JSON per call of say().
PRELUDE = f"""
import ctypes, itertools, json, os, sys
import llama_phase
from llama_phase import attach, environment
from llama_cpp import Llama

def say(**values):
    print(json.dumps(values), flush=True)

def load(path, ubatch={DECODE_UBATCH}, **more):
    sizes = dict(n_ctx=4096, n_batch={PREFILL_UBATCH}, n_ubatch=ubatch, n_threads=1, n_threads_batch=1, seed=1)
    return Llama(path, verbose=False, n_gpu_layers=0, **sizes | more)

def answer(llm, tokens, n=8):
    '''Greedy tokens, and the logits of the last position, bit for bit.'''
    llm.reset()
    out = list(itertools.islice(llm.generate(tokens, temp=0.0), n))
    logits = llm._ctx.get_logits_ith(-1)[: llm.n_vocab()]
    return out, [x.hex() for x in logits[:50]]
"""

Run = Callable[..., list[dict]]


@pytest.fixture
def run(bindings: Path, stock_engine: Path) -> Run:
    """`run(script, stock=False, fails=False, **environment without prefix)`: what the script said."""

    def run_script(script: str, *args: object, stock: bool = False, code: int = 0, **env: str) -> list[dict]:
        library = {"LLAMA_CPP_LIB_PATH": str(stock_engine if stock else bindings), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, args)],
            env=clean_environment(library | (phase_environment(**env) if env else {})),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run_script


def test_structs_are_the_same(engine: Path, tmp_path: Path, monkeypatch, bindings: Path) -> None:
    """Every struct with fields that llama-cpp-python declares: size, and the offset of each field.

    Its llama_opt_params lacks the last field, optimizer_type; it is for training, and as wrong on its own llama.cpp.
    """
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(bindings))
    from llama_cpp import llama_cpp

    structs = structs_of(llama_cpp)
    assert {"llama_model_params", "llama_context_params", "llama_batch"} <= set(structs)
    here = layout_in_python(structs)
    source = engine.parents[1] / "src"
    in_c = layout_in_c(here, [source / "include", source / "ggml/include"], tmp_path)
    assert {name for name in here if here[name] != in_c[name]} == {"llama_opt_params"}


ANSWERS = """
llm = load(sys.argv[1], int(sys.argv[2]))
for tokens in json.loads(sys.argv[3]):
    out, logits = answer(llm, tokens)
    say(tokens=out, logits=logits)
"""


@pytest.mark.parametrize("model", ["qwen3moe", "qwen4exp", "gemma"])
def test_same_tokens_as_on_stock(run: Run, model_path, prompt, model: str) -> None:
    """Same split: ours with nothing set at stock's micro-batch, ours with phases at stock's large one. Logits too."""
    path, prompts = model_path(model), json.dumps([list(prompt(model, n)) for n in (30, 300)])
    stock_small = run(ANSWERS, path, DECODE_UBATCH, prompts, stock=True)
    off = run(ANSWERS, path, DECODE_UBATCH, prompts)
    assert off == stock_small
    phased = run(ANSWERS, path, DECODE_UBATCH, prompts, prefill_ubatch=PREFILL_UBATCH)
    stock_large = run(ANSWERS, path, PREFILL_UBATCH, prompts, stock=True)
    assert phased[0] == stock_small[0], "under the threshold"
    assert phased[1] == stock_large[1]


def test_attach_gives_the_controls(run: Run, model_path, prompt) -> None:
    """Stats, events, explicit prompts, a failure that is undone; and none of it outlives the Llama."""
    script = """
    from llama_phase.errors import EngineClosed
    tokens = json.loads(sys.argv[2])
    before = dict(os.environ)
    with environment(prefill_mode="transaction", prefill_ubatch=512, expert_slots=0):
        llm = load(sys.argv[1])
    assert dict(os.environ) == before
    controls = attach(llm)
    assert attach(llm) is controls
    with controls.events() as events:
        first = answer(llm, tokens)
        say(events=[e.kind for e in events], phase=controls.stats().phase)

    llm.reset()
    with controls.prompt(len(tokens)) as ubatch:
        llm.eval(tokens)
        say(ubatch=ubatch, phase=controls.stats().phase)
    say(phase=controls.stats().phase, entered=controls.stats().n_entered, left=controls.stats().n_left)
    try:
        with controls.prompt(len(tokens)):
            raise KeyError
    except KeyError:
        say(phase=controls.stats().phase, aborted=controls.stats().n_aborted, mode=controls.phase()["mode"])

    def broken(event):
        raise RuntimeError("from a listener")
    sys.unraisablehook = lambda it: say(unraisable=str(it.exc_value))
    controls.on_event(broken)
    with controls.prompt(len(tokens)):
        pass
    llm.close()
    assert controls.closed
    listen = lambda: controls.on_event(print)
    for call in (controls.stats, controls.phase, controls.reset, listen, lambda: attach(llm)):
        try:
            call()
        except EngineClosed as error:
            say(error=str(error))
    controls.close()
    say(alive=True)
    """
    said = run(script, model_path("qwen3moe"), json.dumps(list(prompt("qwen3moe", 700))))
    assert said[:4] == [
        {"events": ["entered", "left"], "phase": "decode"},
        {"ubatch": 512, "phase": "prefill"},
        {"phase": "decode", "entered": 2, "left": 2},
        {"phase": "decode", "aborted": 1, "mode": "transaction"},
    ]
    assert said[4:6] == [{"unraisable": "from a listener"}] * 2
    assert [list(line) for line in said[6:]] == [["error"]] * 5 + [["alive"]]


def test_a_llama_without_phases_says_so(run: Run, model_path) -> None:
    """Nothing set, or a logical batch that is no larger than the micro-batch: neutral answers, no error."""
    script = """
    llm = load(sys.argv[1])
    say(has_phases=attach(llm).stats().has_phases, report=attach(llm).phase())
    with environment(prefill_mode="transaction"):
        small = load(sys.argv[1], ubatch=512)
    with attach(small) as controls, controls.prompt(600) as ubatch:
        say(has_phases=controls.stats().has_phases, ubatch=ubatch)
    """
    off, small = run(script, model_path("qwen3moe"))
    assert off == {"has_phases": False, "report": {"mode": "off", "phase": "decode"}}
    assert small == {"has_phases": False, "ubatch": 512}


def test_attach_refuses_what_is_not_ours(run: Run, model_path) -> None:
    """A Llama on another libllama would be poison to our calls; the fix is said. So are objects of another kind."""
    script = """
    from llama_phase.errors import LlamaPhaseError
    for thing in (load(sys.argv[1]), object(), 0):
        try:
            attach(thing)
            say(attached=True)
        except LlamaPhaseError as error:
            say(error=str(error), fix=error.fix)
    """
    stock, thing, zero = run(script, model_path("qwen3moe"), stock=True)
    assert "LLAMA_CPP_LIB_PATH" in stock["fix"]
    assert "error" in thing and "error" in zero


def test_a_wrong_variable_ends_the_process_before_anything_is_loaded(run: Run, model_path) -> None:
    """The engine's own check, as in the server: exit code 78."""
    assert run("load(sys.argv[1])\nsay(loaded=True)", model_path("qwen3moe"), code=78, EXPERT_SLOTZ="1") == []
