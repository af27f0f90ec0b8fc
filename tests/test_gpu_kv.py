"""The comparison of tools/gpu_kv.py finds what differs, and says when there was nothing to compare; on a GPU it runs
with other models.
"""

from __future__ import annotations

import copy
from pathlib import Path

import gpu_kv
import pytest


def answer(n_tokens: int = 40, cached: int = 0, drafted: int | None = None) -> gpu_kv.Answer:
    """Tokens 500, 501, ..., each with ten candidates."""
    steps = [
        {"id": 500 + i, "logprob": -0.5, "top_logprobs": [{"id": 500 + i + k, "logprob": -0.5 - k} for k in range(10)]}
        for i in range(n_tokens)
    ]
    timings = {"cache_n": cached} | ({"draft_n": drafted, "draft_n_accepted": 1} if drafted else {})
    return gpu_kv.answer_of({"completion_probabilities": steps, "timings": timings})


def test_every_candidate_and_count_is_compared() -> None:
    expected = {"begin": answer(), "fork": answer(cached=4740, drafted=9)}
    assert gpu_kv.first_difference(expected, copy.deepcopy(expected)) == ""
    other = copy.deepcopy(expected)
    other["fork"][0][3][8] = (510, -7.5000005)
    assert gpu_kv.first_difference(expected, other) == "fork, token 3: (510, -7.5) and (510, -7.5000005)"
    other["begin"][0][2][10] = (7, -9.5)
    assert gpu_kv.first_difference(expected, other) == "begin, token 2: (511, -9.5) and (7, -9.5)"
    for changed in ({"begin": answer(39)}, {"fork": answer(cached=4739, drafted=9)}, {"fork": answer(cached=4740)}):
        assert gpu_kv.first_difference(expected, {**expected, **changed}).startswith(next(iter(changed)))
    assert gpu_kv.first_difference(expected, {"begin": expected["begin"]}).startswith("fork")
    assert gpu_kv.first_difference({"begin": expected["begin"]}, expected).startswith("fork")


def test_answers_that_prove_nothing_are_said() -> None:
    drafts, fork = ("-np", "1", *gpu_kv.MTP), "fork behind a checkpoint"
    assert gpu_kv.check_answers({fork: answer(cached=4740), "begin": answer()}, ("-np", "1")) == []
    assert gpu_kv.check_answers({"begin": answer(drafted=9), "single 0": answer(1)}, drafts) == []
    for answers, flags, said in (
        ({"begin": ([[(5, -0.5)]] * 3, [0, None, None])}, (), "candidates are missing"),
        ({"begin": ([], [0, None, None])}, (), "candidates are missing"),
        ({fork: answer(cached=0)}, (), "0 from the cache"),
        ({fork: answer(cached=4900)}, (), "4900 from the cache"),
        ({"begin": answer()}, drafts, "None drafted"),
        ({"begin": answer(drafted=9)}, (), "9 drafted"),
    ):
        (line,) = gpu_kv.check_answers(answers, flags)
        assert said in line


@pytest.fixture
def on_the_cpu(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_PHASE_SERVER_BINARY", str(engine / "llama-server"))
    monkeypatch.setenv("LLAMA_PHASE_STATE_DIR", str(tmp_path))


@pytest.mark.engine
@pytest.mark.slow
def test_a_conversation_is_compared(on_the_cpu: None, model_path, capsys: pytest.CaptureFixture[str]) -> None:
    """With rows that are kept; forks in front of a checkpoint and behind one, a state that is saved and restored."""
    settings = {**gpu_kv.OFF, "ctx": gpu_kv.CTX}
    places = [{"kv": "host", "kv_rows": "4200"}]
    model = model_path("qwen4exp-thin")
    assert gpu_kv.check_case("thin", model, settings, gpu_kv.ONE_SLOT, [gpu_kv.conversation], places) == []
    assert "equal, 16 answers" in capsys.readouterr().out


@pytest.mark.engine
def test_another_split_is_found(
    on_the_cpu: None, model_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches that other kernels take; so are K/V that never went to host memory."""
    monkeypatch.setattr(gpu_kv, "PROMPTS", (1, 300))
    settings = {**gpu_kv.OFF, "ctx": 1024}
    places = [{"kv": "host", "ubatch": 7}, {"kv": "device"}]
    different, unmoved = gpu_kv.check_case(
        "tiny", model_path("qwen4exp"), settings, gpu_kv.ONE_SLOT, [gpu_kv.prompts_twice], places
    )
    assert different.startswith("tiny: prompt 300, 1, token 0: (")
    assert unmoved.startswith("tiny: no K/V in host memory: ")
    assert "DIFFERS prompt 300" in capsys.readouterr().out
