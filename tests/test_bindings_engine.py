"""Engine in this process: the same tokens as the server, and nothing it is asked to do leaves it unusable."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from engine_server import DECODE_UBATCH, MIN_TOKENS, NO_CUTS, PREFILL_UBATCH, Fleet

from llama_phase import Client, Engine
from llama_phase.errors import EngineBusy, EngineClosed, EngineUnusable, ModelError, UsageError

pytestmark = pytest.mark.engine

SIZES = {"ctx": 4096, "batch": PREFILL_UBATCH, "ubatch": DECODE_UBATCH, "threads": 1}
TRANSACTION = {"prefill_mode": "transaction", "prefill_ubatch": PREFILL_UBATCH}
WHOLE = {"ignore_eos": True, "cache_prompt": False}

Make = Callable[..., Engine]


@pytest.fixture
def make(engine, bindings, model_path) -> Iterator[Make]:
    """`make(model, **keywords)`: engines of this test, closed after it."""
    made: list[Engine] = []

    def make_one(model: str = "qwen3moe", **keywords) -> Engine:
        made.append(Engine(model_path(model), **SIZES | TRANSACTION | keywords))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.mark.parametrize("model", ["qwen3moe", "qwen4exp", "qwen35moe", "gemma"])
def test_same_tokens_as_the_server(fleet: Fleet, make: Make, prompt, model: str) -> None:
    """Same split, with phases and without: the tokens, and the text made of them. An Engine makes no checkpoints."""
    phased, off = fleet.phase(model, *NO_CUTS), fleet.off(model, *NO_CUTS)
    in_process, without = make(model), make(model, prefill_mode="off")
    lengths = (7, MIN_TOKENS) if model == "gemma" else (7, MIN_TOKENS, 700)
    for seed, n in enumerate(lengths, 1):
        tokens = prompt(model, n, seed=seed)
        for one, server in ((in_process, phased), (without, off)):
            mine, theirs = one.generate(tokens, 8, **WHOLE), server.post(tokens, 8).json()
            assert mine.tokens == theirs["tokens"], f"prompt of {n}"
            assert mine.text == theirs["content"] and mine.stop_type == theirs["stop_type"]
    assert in_process.stats().n_entered == in_process.stats().n_left == len(lengths) - 1
    assert not without.stats().has_phases


def test_slots_change_nothing(fleet: Fleet, make: Make, prompt) -> None:
    """Any split: experts from slots, and the routing that was traced gives the hits and misses that were counted."""
    from llama_phase import sim

    model, n_slots = "qwen3moe-exact", 12
    tokens = prompt(model, 600)
    with_slots = make(model, expert_slots=n_slots, expert_batch=1, trace_routing=True)
    assert with_slots.generate(tokens, 24, ignore_eos=True).tokens == fleet.stock(model).complete(tokens).tokens
    assert with_slots.stats().n_entered == 1

    before = with_slots.phase()["experts"][0]["slots"]
    with_slots.take_routing()
    slots = {"expert_slots": n_slots, "expert_batch": 1, "prefetch": 0}
    cold = make("qwen3moe", prefill_mode="off", trace_routing=True, **slots)
    cold.generate(prompt("qwen3moe", 100), 24, ignore_eos=True)
    counted = cold.phase()["experts"][0]["slots"]
    replayed = sim.replay(sim.from_routing(cold.take_routing()), 32, n_slots)
    assert (replayed.looked_up, replayed.missed, replayed.evicted) == tuple(
        counted[name] for name in ("looked_up", "missed", "evicted")
    )
    assert before["missed"] > 0 < replayed.missed


@pytest.mark.parametrize("model", ["qwen3moe-exact", "qwen4exp-exact"])
def test_a_reused_prefix_changes_nothing(make: Make, prompt, model: str) -> None:
    """Any split: attention goes on from the common prefix, a recurrent state begins again; both answer as if new."""
    one, tokens = make(model), list(prompt(model, 500))
    first = one.generate(tokens, 8, ignore_eos=True)
    longer = tokens + first.tokens[:4] + [7] * 40
    reused = one.generate(longer, 16, ignore_eos=True)
    assert reused.timings["cache_n"] == (504 if model == "qwen3moe-exact" else 0)
    new = one.generate(longer, 16, ignore_eos=True, cache_prompt=False)
    assert new.timings["cache_n"] == 0
    assert new.tokens == reused.tokens


def test_a_window_that_moved_on_is_not_reused(make: Make, prompt) -> None:
    """Gemma's sliding window has forgotten what came before the prefix's end: the prompt begins anew."""
    one, tokens = make("gemma", prefill_mode="off"), list(prompt("gemma", 900))
    one.generate(tokens, 4)
    again = one.generate(tokens[:100], 8, ignore_eos=True)
    assert again.timings["cache_n"] == 0
    assert again.tokens == one.generate(tokens[:100], 8, ignore_eos=True, cache_prompt=False).tokens


def test_stream_is_generate_in_pieces(make: Make, prompt) -> None:
    one, tokens = make(), prompt("qwen3moe", 1200)
    whole = one.generate(tokens, 12, ignore_eos=True)
    chunks = list(one.stream(tokens, 12, ignore_eos=True, cache_prompt=False, progress=True))
    progress = [chunk.progress for chunk in chunks if chunk.progress]
    assert [p.processed for p in progress] == [512, 1024, 1200] and {p.total for p in progress} == {1200}
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [t for chunk in chunks for t in chunk.tokens] == whole.tokens
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_the_client_has_the_same_shape(fleet: Fleet, make: Make, prompt) -> None:
    """generate, stream, their async twins, tokenize and stats of a server and of an engine: the same values."""
    server, one = fleet.phase("qwen3moe", *NO_CUTS), make()
    tokens = list(prompt("qwen3moe", 700, seed=3))
    keywords = {"n_predict": 12, "ignore_eos": True, "cache_prompt": False}

    async def both_ways(where: Client | Engine) -> tuple:
        seen = []
        answer = where.generate(tokens, on_progress=seen.append, **keywords)
        streamed = [t for chunk in where.stream(tokens, **keywords) for t in chunk.tokens]
        from_async = await where.generate_async(tokens, **keywords)
        assert answer.tokens == streamed == from_async.tokens and answer.text == from_async.text
        assert seen and seen[-1].total == seen[-1].processed == len(tokens)
        with pytest.raises(TypeError, match="temperature"):
            where.generate(tokens, temperatur=1)
        return answer.tokens, answer.text, answer.stop_type, where.tokenize("Hello, world"), where.stats().has_phases

    with Client(f"http://127.0.0.1:{server.port}") as client:
        assert asyncio.run(both_ways(client)) == asyncio.run(both_ways(one))


def test_sampling_with_a_seed_repeats(make: Make, prompt) -> None:
    one, tokens = make(), prompt("qwen3moe", 20)
    answers = [one.generate(tokens, 32, temperature=1.5, top_k=0, top_p=1.0, seed=s).tokens for s in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_stop_words_end_the_text(make: Make, prompt) -> None:
    one, tokens = make(), prompt("qwen3moe", 20)
    text = one.generate(tokens, 16, ignore_eos=True).text
    word = text[len(text) // 2 :][:3]
    stopped = one.generate(tokens, 16, ignore_eos=True, stop=[word, "never there"])
    assert (stopped.stop_type, stopped.text) == ("word", text[: text.index(word)])


class Broken(Exception):
    pass


def test_an_exception_from_a_callback_leaves_a_usable_engine(make: Make, prompt, monkeypatch) -> None:
    """In on_progress it ends the generation, in the prefill phase; in an event's listener it is reported only."""
    one, tokens = make(), prompt("qwen3moe", 1200)
    clean = one.generate(tokens, 8).tokens

    def broken(_: object) -> None:
        raise Broken

    with pytest.raises(Broken):
        one.generate(tokens, 8, on_progress=broken, cache_prompt=False)
    assert one.stats().phase == "decode" and one.stats().n_aborted == 1

    reported: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: reported.append(it.exc_value))
    take_off = one.controls.on_event(broken)
    with one.controls.events() as events:
        assert one.generate(tokens, 8, cache_prompt=False).tokens == clean
    assert [event.kind for event in events] == ["entered", "left"]
    take_off()
    assert one.generate(tokens, 8, cache_prompt=False).tokens == clean
    assert [type(error) for error in reported] == [Broken, Broken]


def test_cancel_from_another_thread(make: Make, prompt) -> None:
    """In the middle of a prompt and of an answer; what comes after is as if it had never been."""
    one, tokens = make(), prompt("qwen3moe", 3500)
    clean = one.generate(tokens[:600], 8, ignore_eos=True).tokens
    for cut in (1, 12):
        with closing(one.stream(tokens, 400, ignore_eos=True, progress=True, cache_prompt=False)) as chunks:
            for _ in range(cut):
                next(chunks)
            canceller = threading.Thread(target=one.cancel)
            canceller.start()
            canceller.join()
            rest = list(chunks)
        assert rest[-1].stop_type == "cancelled" and len(rest) < 10
        assert one.stats().phase == "decode"
        assert one.generate(tokens[:600], 8, ignore_eos=True).tokens == clean


def test_cancelling_a_task_cancels_the_generation(make: Make, prompt) -> None:
    one, tokens = make(), prompt("qwen3moe", 600)
    clean = one.generate(tokens, 8).tokens

    async def cut() -> int:
        task = asyncio.create_task(one.generate_async(tokens, 3000, ignore_eos=True))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        n = 0
        stream = one.stream_async(tokens, 3000, ignore_eos=True)
        async for chunk in stream:
            n += len(chunk.tokens)
            if n == 5:
                break
        await stream.aclose()
        return n

    assert asyncio.run(cut()) == 5
    assert one.generate(tokens, 8, cache_prompt=False).tokens == clean
    assert not [t for t in threading.enumerate() if t.name == "llama-phase stream"]


def test_one_generation_at_a_time(make: Make, prompt) -> None:
    """A second one is refused at once: from the same thread, from a callback, and from another thread."""
    one, tokens = make(), prompt("qwen3moe", 600)
    refused = []

    def second(_: object = None) -> None:
        with pytest.raises(EngineBusy):
            one.generate(tokens, 4)
        refused.append(threading.current_thread().name)

    with closing(one.stream(tokens, 50, ignore_eos=True)) as chunks:
        next(chunks)
        second()
        other = threading.Thread(target=second)
        other.start()
        other.join()
    one.generate(tokens, 4, on_progress=second, cache_prompt=False)
    assert len(refused) >= 3
    assert one.generate(tokens, 4).tokens


def test_threads_share_nothing_but_the_library(make: Make, prompt) -> None:
    """Engines of their own, at the same time, while others ask for stats."""
    tokens = prompt("qwen3moe", 600)
    engines = [make() for _ in range(3)]
    clean = engines[0].generate(tokens, 16, cache_prompt=False).tokens
    answers: list[list[int]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            for one in engines:
                one.stats(), one.phase()

    def work(one: Engine) -> None:
        answers.extend(one.generate(tokens, 16, cache_prompt=False).tokens for _ in range(3))

    asking = threading.Thread(target=ask)
    threads = [threading.Thread(target=work, args=(one,)) for one in engines]
    for thread in (asking, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    asking.join()
    assert answers == [clean] * 9


def test_other_threads_run_during_a_decode(make: Make, prompt) -> None:
    """The GIL is free while llama.cpp computes, whole batches long."""
    one, tokens = make(prefill_mode="off"), prompt("qwen3moe", 500)
    ticks: list[float] = []
    done = threading.Event()
    ticking = threading.Thread(
        target=lambda: [ticks.append(time.monotonic()) for _ in iter(lambda: done.wait(0.001), True)]
    )
    ticking.start()
    began = time.monotonic()
    one._context.decode(list(tokens), 0)  # one call
    ended = time.monotonic()
    done.set()
    ticking.join()
    assert len([tick for tick in ticks if began < tick < ended]) >= 5


def test_use_after_close(make: Make, prompt) -> None:
    """Every public call says so; close may be repeated; a stream that is open ends with the same error."""
    one, tokens = make(), prompt("qwen3moe", 300)
    stream = one.stream(tokens, 100, ignore_eos=True)
    next(stream)
    controls = one.controls
    one.close()
    one.close()
    assert one.closed and controls.closed
    with pytest.raises(EngineClosed):
        list(stream)
    calls: list[Callable] = [
        lambda: one.generate("x"),
        lambda: one.stream("x"),
        lambda: one.stream_async("x"),
        lambda: one.tokenize("x"),
        lambda: one.detokenize([1]),
        lambda: one.n_ctx,
        lambda: one.stats(),
        lambda: one.phase(),
        lambda: one.take_routing(),
        lambda: controls.reset(),
        lambda: controls.on_event(print),
        lambda: controls.failure,
        lambda: controls.prompt(5).__enter__(),
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            call()
    one.cancel()


def test_close_during_a_decode_ends_it(make: Make, prompt) -> None:
    one, tokens = make(), prompt("qwen3moe", 3800)
    ended: list[BaseException] = []
    began = threading.Event()

    def work() -> None:
        try:
            one.generate(tokens, 200, ignore_eos=True, on_progress=lambda _: began.set())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(60)
    one.close()
    thread.join(60)
    assert [type(error) for error in ended] == [EngineClosed]


def test_a_rolled_back_switch_and_an_unusable_engine(make: Make, prompt) -> None:
    """The first costs speed and is told; the second raises EngineUnusable from then on, and closing does no harm."""
    tokens = prompt("qwen3moe-exact", 600)
    step = "enter.reserve_prefill_buffers"
    rolled = make("qwen3moe-exact", fault=step)
    with rolled.controls.events() as events:
        answer = rolled.generate(tokens, 8, ignore_eos=True).tokens
    assert [(event.kind, event.step) for event in events] == [("rolled_back", step)]
    assert answer == make("qwen3moe-exact", prefill_mode="off").generate(tokens, 8, ignore_eos=True).tokens

    broken = make(fault="leave.reserve_decode_buffers,leave.retry_decode_buffers")
    for _ in range(2):
        with pytest.raises(EngineUnusable, match="retry_decode_buffers"):
            broken.generate(tokens, 8)
    assert "leave.retry_decode_buffers" in broken.controls.failure
    broken.close()


@pytest.mark.parametrize(
    ("keywords", "kind", "said"),
    [
        ({"ubtach": 5}, TypeError, "ubatch"),
        ({"expert_slot": 5}, TypeError, "expert_slots"),
        ({"gpu_layer": 5}, TypeError, "gpu_layers"),
        ({"prefill_mode": "sometimes"}, UsageError, "prefill_mode"),
        ({"fault": "enter.nothing"}, UsageError, "LLAMA_PHASE_FAULT"),
    ],
)
def test_wrong_keywords_are_named(make: Make, keywords: dict, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make(**keywords)
    assert not [name for name in os.environ if name.startswith("LLAMA_PHASE_")]


def test_wrong_models_and_prompts_are_refused(make: Make, tmp_path) -> None:
    bad = tmp_path / "bad.gguf"
    with pytest.raises(ModelError, match="is not a file"):
        Engine(bad)
    bad.write_bytes(b"GGUF and nothing behind it")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Engine(bad)
    one = make()
    for tokens, said in (([], "empty"), ([5] * 4096, "4096 tokens"), ([10**6], "code -1")):
        with pytest.raises(Exception, match=said):
            one.generate(tokens)
    assert one.generate([5, 6], 4).tokens
