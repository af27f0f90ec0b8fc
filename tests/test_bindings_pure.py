"""What the bindings decide without a model: policy, transaction, traces, environment, requests, text, async streams."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_phase import environment
from llama_phase.async_bridge import iterate_in_thread
from llama_phase.engine_settings import load_settings
from llama_phase.errors import UsageError
from llama_phase.generation import Request
from llama_phase.phase_facts import PhaseStats
from llama_phase.text_pieces import TextPieces

# the environment


def test_environment_puts_back_exactly_what_was_there(monkeypatch) -> None:
    """Variables that were set, empty, unset, and of a further block inside; also when an exception passes."""
    monkeypatch.setenv("LLAMA_PHASE_RING", "3")
    monkeypatch.setenv("LLAMA_PHASE_FAULT", "")
    monkeypatch.delenv("LLAMA_PHASE_EXPERT_SLOTS", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), environment(prefill_mode="transaction", expert_slots=16) as outer:
        assert outer == {"LLAMA_PHASE_PREFILL_MODE": "transaction", "LLAMA_PHASE_EXPERT_SLOTS": "16"}
        assert {k: v for k, v in os.environ.items() if k.startswith("LLAMA_PHASE_")} == outer
        with environment(ring=5):
            os.environ["LLAMA_PHASE_LOG"] = "debug"  # set behind our back: gone as well
            assert "LLAMA_PHASE_EXPERT_SLOTS" not in os.environ
        assert os.environ["LLAMA_PHASE_EXPERT_SLOTS"] == "16"
        raise KeyError
    assert dict(os.environ) == before


def test_environment_of_settings(monkeypatch) -> None:
    """As a server's child gets it: what differs from the engine's default."""
    from llama_phase import Settings

    monkeypatch.delenv("LLAMA_PHASE_PREFILL_MODE", raising=False)
    with environment(Settings.load(model=Path("m.gguf"), expert_slots=32)) as variables:
        assert variables["LLAMA_PHASE_EXPERT_SLOTS"] == os.environ["LLAMA_PHASE_EXPERT_SLOTS"] == "32"
        assert variables["LLAMA_PHASE_PREFILL_MODE"] == "transaction"


def test_environment_refuses_before_it_sets() -> None:
    before = dict(os.environ)
    for keywords, kind, said in (
        ({"expert_slot": 4}, TypeError, "expert_slots"),
        ({"prefill_mode": "maybe"}, UsageError, "LLAMA_PHASE_PREFILL_MODE"),
        ({"expert_slots": -1}, UsageError, "LLAMA_PHASE_EXPERT_SLOTS"),
    ):
        with pytest.raises(kind, match=said), environment(**keywords):
            pass
    assert dict(os.environ) == before


def test_blocks_of_two_threads_do_not_mix() -> None:
    """The second waits, so that each finds its own values throughout."""
    seen: list[tuple[str, str]] = []

    def use(n: int) -> None:
        for _ in range(50):
            with environment(expert_slots=n):
                seen.append((str(n), os.environ["LLAMA_PHASE_EXPERT_SLOTS"]))

    threads = [threading.Thread(target=use, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 150 and all(wanted == found for wanted, found in seen)
    assert "LLAMA_PHASE_EXPERT_SLOTS" not in os.environ


# requests, text, reports


def test_unknown_keywords_name_the_nearest() -> None:
    assert Request.of(5, {"stop": "x"}).stop == ("x",)
    with pytest.raises(TypeError, match=r"'temprature'.*'temperature'"):
        Request.of(5, {"temprature": 1.0})


@pytest.mark.parametrize("name", ["n_predict", "top_k", "seed", "temperature", "top_p", "min_p", "stop"])
def test_a_text_is_no_number_and_a_number_is_no_text(name: str) -> None:
    wrong = [4] if name == "stop" else "4"
    with pytest.raises(TypeError, match=name):
        Request.of(*((wrong, {}) if name == "n_predict" else (4, {name: wrong})))
    assert Request.of(np.int64(5), {"temperature": 1, "seed": None}).n_predict == 5


@pytest.mark.parametrize(
    "keywords", [{"ctx": 10**12}, {"batch": 2**31}, {"gpu_layers": 10**12}, {"threads": "4"}, {"threads_batch": 2**31}]
)
def test_a_number_the_engine_cannot_take_is_refused_by_name(keywords: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(keywords))) as caught:
        load_settings(Path("m.gguf"), None, keywords)
    assert caught.value.fix and "flag" not in str(caught.value)


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy at times
FEW = "abc\u00e9\u20ac\U0001f642"  # one to four bytes each


@PATIENT
@given(st.text(FEW, max_size=40), st.lists(st.text(FEW, min_size=1, max_size=4), max_size=3), st.randoms())
def test_text_pieces_give_the_text_up_to_the_first_stop_word(text: str, stop: list[str], source) -> None:
    """However the bytes are cut into tokens; nothing of a stop word is ever given away."""
    data = text.encode()
    cuts = sorted(source.randrange(len(data) + 1) for _ in range(5))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    pieces = TextPieces(lambda token: parts[token], stop)
    given_away = ""
    for token in range(len(parts)):
        given_away += pieces.add(token)
        if pieces.stopped:
            break
    given_away += pieces.rest()
    if any(word in text for word in stop):
        # a word is cut off as soon as it is complete, even where a longer text has an earlier one that completes later
        assert pieces.stopped and text.startswith(given_away) and not any(word in given_away for word in stop)
    else:
        assert given_away == text


def test_stats_of_a_report() -> None:
    assert PhaseStats.from_report(None) == PhaseStats.from_report({"mode": "off"}) == PhaseStats(False, "decode")


# async streams


def test_an_async_stream_ends_its_thread_however_it_ends() -> None:
    """At the end, by an error, by aclose and by cancellation: the items so far, and no thread is left."""
    closed: list[str] = []

    def source(stop: threading.Event, fail: bool = False):
        try:
            for i in range(1000):
                yield i
                if fail and i == 3:
                    raise KeyError
                if i > 5 and stop.wait(30):
                    return
        finally:
            closed.append("x")

    async def run() -> None:
        stop = threading.Event()
        with pytest.raises(KeyError):
            [item async for item in iterate_in_thread(lambda: source(stop, fail=True), stop.set)]

        stream = iterate_in_thread(lambda: source(stop), stop.set)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        assert stop.is_set()

        stop = threading.Event()

        async def forever() -> None:
            async for _ in iterate_in_thread(lambda: source(stop), stop.set):
                pass

        task = asyncio.create_task(forever())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed == ["x"] * 3
    assert not [thread for thread in threading.enumerate() if thread.name == "llama-phase stream"]


# the compiled pure modules


@pytest.fixture(scope="module")
def binding(bindings):
    from llama_phase.engine_library import native

    return native()


@pytest.mark.engine
@PATIENT
@given(steps=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=30), n_slots=st.integers(4, 10))
def test_slot_policy_is_lru(binding, steps: list[list[int]], n_slots: int) -> None:
    """Against a model in Python: hits are refreshed first, misses take the oldest slots, the lowest of equals."""
    policy, missed = binding.SlotPolicy(10, n_slots), 0
    held: list[int | None] = [None] * n_slots
    used = [0] * n_slots
    for now, ids in enumerate(steps, 1):
        slots = policy.fetch(ids)
        for slot, expert in enumerate(held):
            used[slot] = now if expert in ids else used[slot]
        absent = [i for i in dict.fromkeys(ids) if i not in held]
        for expert in absent:
            slot = min(range(n_slots), key=used.__getitem__)
            held[slot], used[slot] = expert, now
        missed += len(absent)
        assert slots == [held.index(i) for i in ids]
        assert [expert for expert, _ in policy.jobs] == absent
    assert policy.missed == missed and policy.looked_up == sum(map(len, steps)) and policy.runs == len(steps)


@pytest.mark.engine
def test_slot_policy_refuses_what_would_corrupt_it(binding) -> None:
    policy = binding.SlotPolicy(8, 4)
    for wrong in ([8], [-1], [0, 1, 2, 3, 4], [0] * (binding.MAX_IDS + 1)):
        with pytest.raises(ValueError):
            policy.fetch(wrong)
    assert policy.runs == 0 and policy.resident == []
    with pytest.raises(ValueError):
        binding.SlotPolicy(0, 4)
    policy.fill([1, 2, 3, 4, 5])
    assert policy.resident == [2, 3, 4, 5]


@pytest.mark.engine
def test_a_transaction_undoes_what_failed(binding) -> None:
    """In reverse, the failed step included; times from the clock given; what is no Exception comes out again."""
    done: list[str] = []
    ticks = iter(range(100))

    def step(name: str, error: BaseException | None = None):
        def act() -> int:
            done.append(name)
            if error is not None:
                raise error
            return 10

        return (name, act, f"undo {name}", lambda: done.append(f"undo {name}"))

    report = binding.run_transaction(
        [step("a"), step("b", OSError("full")), step("c")], clock=lambda: float(next(ticks))
    )
    assert done == ["a", "b", "undo b", "undo a"]
    assert (report["outcome"], report["failed_step"], report["reason"]) == ("rolled back", "b", "full")
    assert [s["bytes"] for s in report["steps"]] == [10, 0, 0, 0] and report["steps"][0]["ms"] == 1.0

    report = binding.run_transaction([step("a"), step("b")], faults=[("b", 1), ("undo a", 0)])
    assert (report["outcome"], report["failed_step"]) == ("broken", "b")
    assert binding.run_transaction([step("a"), step("b")])["outcome"] == "committed"

    done.clear()
    with pytest.raises(KeyboardInterrupt):
        binding.run_transaction([step("a"), step("b", KeyboardInterrupt())])
    assert done == ["a", "b", "undo b", "undo a"]


@pytest.mark.engine
def test_more_slots_never_miss_more(bindings, tmp_path: Path) -> None:
    """LRU has no anomaly; a trace survives its file; a popular few need few slots."""
    from llama_phase import sim

    flat = sim.synthetic_trace(150, 3, 32, 4, skew=0.0, repeat=0.0, seed=1)
    skewed = sim.synthetic_trace(150, 3, 32, 4, skew=2.0, repeat=0.3, seed=1)
    sim.save_trace(skewed, tmp_path / "trace.jsonl")
    assert sim.load_trace(tmp_path / "trace.jsonl") == skewed
    curves = [[r.hit_rate for r in sim.sweep(trace, 32, (4, 8, 16, 32))] for trace in (flat, skewed)]
    assert all(curve == sorted(curve) for curve in curves)
    assert curves[1][1] > curves[0][1] + 0.2
    cold = sim.replay(skewed, 32, 32)
    assert cold.evicted == 0 and sim.replay(skewed, 32, 32, warm={i: list(range(32)) for i in range(3)}).missed == 0

    (tmp_path / "bad.jsonl").write_text('{"layer": 0, "ids": [1]}\n{"layer": 0}\n')
    with pytest.raises(UsageError, match=":2 is not a step"):
        sim.load_trace(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="do not fit into 3 slots"):
        sim.replay([(0, [1, 2, 3, 4])], 32, 3)
