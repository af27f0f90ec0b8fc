"""What the bindings do to the process they live in: leaks, exit, fork, Ctrl-C. Each test has a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_server import DECODE_UBATCH, PREFILL_UBATCH, ROOT, clean_environment

pytestmark = pytest.mark.engine

CYCLES = int(os.environ.get("TEST_BINDINGS_CYCLES", "60"))

PRELUDE = f"""
import gc, json, os, signal, sys, threading, time
import psutil
from llama_phase import Engine
from llama_phase.errors import EngineBusy, EngineClosed

def say(**values):
    print(json.dumps(values), flush=True)

def make(**more):
    sizes = dict(ctx=4096, batch={PREFILL_UBATCH}, ubatch={DECODE_UBATCH}, prefill_ubatch={PREFILL_UBATCH}, threads=1)
    return Engine(sys.argv[1], **sizes | more)

LONG = [100 + i * 37 % 3000 for i in range(3800)]
"""


@pytest.fixture
def start(bindings: Path, model_path) -> Callable[..., subprocess.Popen]:
    """`start(script)`: a process that runs it on the tiny model."""

    def start_script(script: str, model: str = "qwen3moe") -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(model_path(model))],
            env=clean_environment({"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_script


def finish(process: subprocess.Popen, code: int = 0, timeout_s: float = 120) -> tuple[list[dict], str]:
    """What it said, and its stderr; it has to end by itself, with `code`."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, f"exit code {process.returncode}\n{out}{err}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


def test_engines_come_and_go_without_growth(start) -> None:
    """TEST_BINDINGS_CYCLES=1000 for the long run. Closed, closed with a stream open, and dropped with one, in turn.

    Memory in use (malloc's own count) does not grow; the resident set does until malloc has enough free pieces.
    """
    script = f"""
    import ctypes

    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "a b c d mapped e f used g h".split()]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    me, marks = psutil.Process(), []
    for i in range({CYCLES} + 20):
        if i in (20, {CYCLES} + 19):
            gc.collect()
            heap = libc.mallinfo2()
            marks.append((heap.used + heap.mapped, me.memory_info().rss, me.num_fds(), me.num_threads()))
        one = make(ctx=512)
        stream = one.stream([5, 6, 7], 4, ignore_eos=True)
        next(stream)
        if i % 3 == 0:
            list(stream)
            one.close()
        elif i % 3 == 1:
            one.close()
        del stream, one
    say(marks=marks)
    """
    (said,), _ = finish(start(script), timeout_s=60 + 2 * CYCLES)
    (used, rss, *others), (used_after, rss_after, *others_after) = said["marks"]
    assert others_after == others, "descriptors, threads"
    assert used_after - used < 2**19 + 2**10 * CYCLES, f"{(used_after - used) / CYCLES / 1024:.1f} KiB per cycle"
    assert rss_after - rss < 48 * 2**20


@pytest.mark.parametrize(
    ("how", "script"),
    [
        ("idle", "one = make(); one.generate(LONG[:600], 4)"),
        ("a stream open", "one = make(); stream = one.stream(LONG[:600], 50); next(stream)"),
        ("a listener", "one = make(); one.controls.on_event(print); one.generate(LONG[:600], 4)"),
        ("a daemon thread that decodes", "one = make(); begin(one)"),
        ("in a cycle", "one = make(); one.myself = one; one.generate([5, 6], 2)"),
        ("raw handles", "one = make(); kept = one._context, one._model, one._context.controls(); import llama_phase"),
        ("an exception on its way", "one = make(); one.generate([5, 6], 2); raise SystemExit(0)"),
    ],
)
def test_the_interpreter_ends_with_an_engine_open(start, how: str, script: str) -> None:
    """Exit code 0, nothing on stderr, at once."""
    prelude = """
    def begin(one):
        began = threading.Event()
        run = lambda: one.generate(LONG, 200, ignore_eos=True, on_progress=lambda _: began.set())
        threading.Thread(target=quietly, args=(run,), daemon=True).start()
        assert began.wait(60)

    def quietly(run):
        try:
            run()
        except EngineClosed:
            pass
    """
    _, err = finish(start(textwrap.dedent(prelude) + script))
    assert err == "", how


def test_a_forked_child_is_refused_and_ends_well(start) -> None:
    """Also when the parent's other thread decodes meanwhile. The child's own engine works, the parent's goes on."""
    script = """
    one = make()
    clean = one.generate(LONG[:600], 8, ignore_eos=True).tokens
    began = threading.Event()
    thread = threading.Thread(target=lambda: one.generate(LONG, 20, on_progress=lambda _: began.set()))
    thread.start()
    began.wait(60)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: one.generate([5], 2), lambda: one.stream([5]), one.stats, one.phase, lambda: one.n_ctx):
            try:
                call()
            except EngineClosed:
                refused += 1
        one.close()
        one.cancel()
        del one
        gc.collect()
        say(refused=refused, same=make().generate(LONG[:600], 8, ignore_eos=True).tokens == clean)
        sys.exit(7)
    thread.join()
    say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(parent=one.generate(LONG[:600], 8, ignore_eos=True).tokens == clean)
    """
    said, _ = finish(start(script))
    assert said == [{"refused": 5, "same": True}, {"child": 7}, {"parent": True}]


@pytest.mark.parametrize("model", ["qwen3moe", "qwen35moe"])
def test_ctrl_c_in_generate_leaves_a_usable_engine(start, model: str) -> None:
    """In the middle of a prompt's decode and of an answer: KeyboardInterrupt at once, then clean answers."""
    script = """
    one = make(ctx=8192)
    clean = one.generate(LONG[:600], 8, ignore_eos=True).tokens
    for prompt in (LONG, LONG[:600]):
        try:
            say(ready=True)
            one.generate(prompt * 2 if prompt is LONG else prompt, 7000, ignore_eos=True, cache_prompt=False)
            say(finished=True)
        except KeyboardInterrupt:
            say(interrupted=True)
        say(phase=one.stats().phase, same=one.generate(LONG[:600], 8, ignore_eos=True).tokens == clean)
    """
    process = start(script, model)
    said: list[dict] = []
    delays_s = iter((0.3, 1.5))
    sent_at = 0.0
    for line in process.stdout:
        said.append(json.loads(line))
        if said[-1] == {"ready": True}:
            time.sleep(next(delays_s))  # into the decode: there is nothing to poll in there
            process.send_signal(signal.SIGINT)
            sent_at = time.monotonic()
        elif said[-1] == {"interrupted": True}:
            assert time.monotonic() - sent_at < 20
    finish(process)
    usable = {"phase": "decode", "same": True}
    assert said == [{"ready": True}, {"interrupted": True}, usable] * 2


def test_ctrl_c_while_loading(start) -> None:
    """The load is given up, nothing is left open, and the next one works."""
    script = """
    me = psutil.Process()
    make().close()
    before, interrupted, one = me.num_fds(), 0, None
    for delay in (0.0, 0.01, 0.03, 0.06):
        try:
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            one = make()
            time.sleep(1)
        except KeyboardInterrupt:
            interrupted += 1
        one = None
    gc.collect()
    works = len(make().generate([5, 6], 3, ignore_eos=True).tokens)
    say(interrupted=interrupted, fds=me.num_fds() - before, works=works)
    """
    (said,), _ = finish(start(script))
    assert said == {"interrupted": 4, "fds": 0, "works": 3}
