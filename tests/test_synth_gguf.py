"""tools/synth_gguf.py: what it writes is consistent, reproducible and refused when impossible; no half files.

Whether llama.cpp loads the models is shown by the tests that serve them.
"""

from __future__ import annotations

import hashlib
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
SYNTH = ROOT / "tools" / "synth_gguf.py"
sys.path.insert(0, str(SYNTH.parent))

from synth.checked_spec import make_spec  # noqa: E402
from synth.gguf_file import llama_cpp_dir, use_gguf_py  # noqa: E402
from synth_gguf import make_model, plan_tensors  # noqa: E402

from llama_phase.errors import LlamaPhaseError, MissingPrerequisite, ModelError, UsageError  # noqa: E402

TINY = ["tiny", "tiny-exact", "tiny-moe", "tiny-moe-exact", "tiny-35", "tiny-35-exact"]
SIZES = {
    "arch": ["qwen35moe", "qwen3moe", "gpt-oss"], "layers": [1, 4, 5], "n_embd": [32, 96, 100], "heads": [2, 6],
    "heads_kv": [1], "head_dim": [32, 40, 64], "rope_dim": [8, 16], "experts": [4, 5], "experts_used": [1, 5],
    "n_ff_exp": [32, 64],
    "n_ff_shexp": [32, 96], "lin_heads_k": [1, 2], "lin_heads_v": [2, 3], "lin_dim": [16, 32], "attn_every": [1, 2, 3],
    "hc": [1, 2, 3], "hc_rank": [1, 8], "idx_dim": [32, 40], "idx_topk": [6, 8], "idx_ratio": [0, 2], "ple": [False],
    "ple_heads": [1, 4], "ple_vocab": [20, 40], "mtp": ["no", "only"],
    "expert_type": ["F32", "Q8_0", "Q4_K", "Q4_0,F16"], "dense_type": ["Q8_0", "Q4_0", "Q4_K"],
    "embd_type": ["F16", "Q8_0", "Q4_0"], "distinct_limit": [0.0],
}  # fmt: skip
BIG = ["--layers", "400"]  # 1.8 GB: long enough to be interrupted in the middle


@pytest.fixture(scope="module")
def source() -> Path:
    source = llama_cpp_dir()
    use_gguf_py(source)
    return source


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """made(preset, **overrides): a model of this module, made once."""
    folder = tmp_path_factory.mktemp("models")

    def make(preset: str, **overrides) -> Path:
        name = "-".join([preset, *(f"{k}={v}" for k, v in overrides.items())])
        return make_model(preset, folder / f"{name}.gguf", **overrides)

    return make


def parse(path: Path):
    """Metadata by key, and tensors by name, of the reference reader."""
    import gguf

    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def shape(tensor) -> list[int]:
    return [int(n) for n in tensor.shape]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*argv: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SYNTH, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize("preset", TINY)
def test_metadata_and_tensors_agree(made, preset):
    path = made(preset)
    assert path.stat().st_size < 60e6
    kv, tensors = parse(path)
    arch = kv["general.architecture"]
    spec = make_spec(preset)

    def of(key):
        return kv[f"{arch}.{key}"]

    assert arch == spec.arch
    assert of("context_length") >= 8192
    n_embd, experts, blocks = of("embedding_length"), of("expert_count"), of("block_count")
    assert blocks == spec.layers + kv.get(f"{arch}.nextn_predict_layers", 0)
    assert {int(name.split(".")[1]) for name in tensors if name.startswith("blk.")} == set(range(blocks))
    n_tokens = len(kv["tokenizer.ggml.tokens"])
    assert shape(tensors["token_embd.weight"]) == shape(tensors["output.weight"]) == [n_embd, n_tokens]
    assert len(kv["tokenizer.ggml.token_type"]) == n_tokens
    assert all(kv[key] < n_tokens for key in kv if key.endswith("_token_id") and key.startswith("tokenizer"))
    hidden = of("expert_feed_forward_length")
    for block in range(blocks):
        b = f"blk.{block}"
        assert shape(tensors[f"{b}.ffn_gate_exps.weight"]) == [n_embd, hidden, experts]
        assert shape(tensors[f"{b}.ffn_up_exps.weight"]) == [n_embd, hidden, experts]
        assert shape(tensors[f"{b}.ffn_down_exps.weight"]) == [hidden, n_embd, experts]
        assert shape(tensors[f"{b}.ffn_gate_inp.weight"]) == [n_embd, experts]
        assert (f"{b}.ssm_out.weight" in tensors) != (f"{b}.attn_q.weight" in tensors)
    for name, tensor in tensors.items():
        if tensor.tensor_type.name == "F32":
            assert np.isfinite(tensor.data).all(), name
    types = {t.tensor_type.name for t in tensors.values()}
    assert types == ({"F32"} if preset.endswith("-exact") else {"F32", "Q4_0"})


@pytest.mark.parametrize("preset", ["tiny", "tiny-exact"])
def test_qwen4exp_presets_exercise_every_feature_of_the_architecture(made, preset):
    kv, tensors = parse(made(preset))
    ratios, recurrent = kv["qwen4exp.attention.compress_ratios"], kv["qwen4exp.attention.recurrent_layers"]
    trunk = kv["qwen4exp.block_count"] - kv["qwen4exp.nextn_predict_layers"]
    assert sum(not r for r in recurrent[:trunk]) >= 2, "several QSA layers"
    for block, (ratio, is_recurrent) in enumerate(zip(ratios, recurrent, strict=True)):
        assert (ratio > 0) == (not is_recurrent) == (f"blk.{block}.indexer.q_proj.weight" in tensors)
        assert (f"blk.{block}.ssm_out.weight" in tensors) == is_recurrent
    assert kv["qwen4exp.attention.indexer.top_k"] < 8192, "selection must leave rows out within the context"
    assert f"blk.{trunk}.nextn.eh_proj.weight" in tensors
    (ple_layer,) = kv["qwen4exp.ple.layers"]
    assert recurrent[ple_layer] and f"blk.{ple_layer}.ple_key.weight" in tensors
    rows = shape(tensors["per_layer_token_embd.weight"])[1]
    heads = zip(kv["qwen4exp.ple.head_offsets"], kv["qwen4exp.ple.head_vocab_sizes"], strict=True)
    assert all(offset + size <= rows for offset, size in heads)


def test_blocks_take_several_expert_types_in_turn(made):
    overrides = {"expert_type": "Q8_0,Q4_K,F16", "layers": 4}
    _, tensors = parse(made("tiny-moe", **overrides))
    types = [tensors[f"blk.{block}.ffn_up_exps.weight"].tensor_type.name for block in range(4)]
    assert types == ["Q8_0", "Q4_K", "F16", "Q8_0"]
    _, same = parse(made("tiny-moe", layers=4, expert_type="Q4_K"))
    for name in ("ffn_gate_exps", "ffn_down_exps"):
        assert (tensors[f"blk.1.{name}.weight"].data == same[f"blk.1.{name}.weight"].data).all()


def test_same_flags_give_the_same_bytes_in_another_process(made, tmp_path):
    other = tmp_path / "other.gguf"
    done = run("--preset", "tiny-moe", "-o", other, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr
    assert digest(other) == digest(made("tiny-moe"))


@pytest.mark.parametrize("preset", ["tiny", "tiny-35"])
@pytest.mark.parametrize("mtp", ["no", "only"])
def test_mtp_choice_does_not_change_the_tensors_it_shares(made, preset, mtp):
    _, whole = parse(made(preset))
    _, part = parse(made(preset, mtp=mtp))
    assert set(part) < set(whole)
    assert any(".nextn." in name for name in part) == (mtp == "only")
    for name, tensor in part.items():
        assert tensor.data.tobytes() == whole[name].data.tobytes(), name


def test_another_seed_changes_every_matrix(made):
    _, one = parse(made("tiny-moe"))
    _, two = parse(made("tiny-moe", seed=2))
    assert not [name for name in one if one[name].data.tobytes() == two[name].data.tobytes()]


@pytest.mark.parametrize("distinct_limit", [0.0, 4.0])
def test_no_two_experts_are_equal(made, distinct_limit):
    _, tensors = parse(made("tiny-moe", distinct_limit=distinct_limit))
    for name in ("blk.0.ffn_up_exps.weight", "blk.7.ffn_down_exps.weight"):
        experts = tensors[name].data
        assert len({expert.tobytes() for expert in experts}) == make_spec("tiny-moe").experts


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
def test_drawn_blocks_have_the_asked_spread(source, kind):
    import gguf
    from synth.blocks import Type, draw, generator_for

    n = 1 << 18
    raw = draw(generator_for(1, kind), Type[kind], n, 0.03)
    values = gguf.quants.dequantize(raw, Type[kind]).reshape(-1)
    assert len(values) == n
    assert abs(values.mean()) < 0.03 * 5 / math.sqrt(n)
    assert values.std() == pytest.approx(0.03, rel=0.03)


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("F16", 1e-3), ("Q8_0", 1e-2), ("Q4_0", 0.2)])
def test_encoded_rows_keep_their_values(source, kind, error):
    import gguf
    from synth.blocks import Type, encode, generator_for

    rows = generator_for(1, "rows").standard_normal((64, 256), dtype=np.float32)
    back = gguf.quants.dequantize(encode(Type[kind], rows).reshape(64, -1), Type[kind])
    assert np.sqrt(((back - rows) ** 2).mean()) <= error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_accepted_sizes_always_make_a_complete_model(source, data):
    """Any mix of sizes is either refused with a UsageError, or gives tensors whose generators fill them exactly."""
    chosen = data.draw(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in SIZES.items()}))
    try:
        spec = make_spec("tiny", **{"vocab": 400, **chosen})
    except UsageError:
        return
    plan, vocabulary = plan_tensors(spec, source)
    assert len({t.name for t in plan.tensors}) == len(plan.tensors)
    assert len(vocabulary.tokens) == 400
    for t in plan.tensors:
        assert sum(chunk.nbytes for chunk in t.chunks()) == t.n_bytes, t.name


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"idx_topk": 250}, ["--idx-topk 250", "--idx-ratio 4"]),
        ({"idx_ratio": 1}, ["--idx-ratio 1"]),
        ({"idx_dim": 16}, ["--idx-dim 16", "--rope-dim 32"]),
        ({"rope_dim": 128}, ["--rope-dim 128", "--head-dim 64"]),
        ({"layers": 3}, ["--layers 3", "--attn-every 4"]),
        ({"attn_every": 2}, ["--attn-every 2", "PLE"]),
        ({"ple_heads": 3}, ["--n-embd 256", "--ple-heads 3"]),
        ({"ple_vocab": 2**30}, ["--ple-vocab 1073741824", "--ple-heads 2"]),
        ({"hc": 1}, ["--hc 1"]),
        ({"lin_heads_v": 3}, ["--lin-heads-v 3", "--lin-heads-k 2"]),
        ({"lin_dim": 48}, ["--lin-dim 48", "128"]),
        ({"heads": 3}, ["--heads 3", "--heads-kv 2"]),
        ({"experts_used": 33}, ["--experts-used 33", "--experts 32"]),
        ({"experts": 2048}, ["--experts 2048", "1024"]),
        ({"experts_used": 0}, ["--experts-used 0"]),
        ({"n_embd": 100}, ["--n-embd 100", "32"]),
        ({"arch": "qwen3moe"}, ["--mtp yes", "--arch qwen3moe"]),
        ({"arch": "gpt-oss"}, ["--mtp yes", "--arch gpt-oss"]),
        ({"arch": "llama"}, ["--arch llama", "qwen3moe"]),
        ({"embd_type": "Q4_K"}, ["--embd-type Q4_K", "Q8_0"]),
        ({"locality": 1.0}, ["--locality 1.0"]),
        ({"cluster": 100}, ["--cluster 100"]),
        ({"layers": "8"}, ["layers", "'8'", "int"]),
        ({"idx_top_k": 8}, ["idx_top_k"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_refused_by_name_and_value(tmp_path, overrides, named):
    with pytest.raises(UsageError) as caught:
        make_model("tiny", tmp_path / "never.gguf", **overrides)
    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_vocabulary_smaller_than_its_special_tokens_is_refused(source, tmp_path):
    with pytest.raises(UsageError, match=r"--vocab 100 is below the \d+"):
        make_model("tiny", tmp_path / "never.gguf", vocab=100)
    assert not list(tmp_path.iterdir())


def test_kept_with_the_same_flags_and_made_again_with_others(source, tmp_path):
    path = tmp_path / "folder" / "model.gguf"
    make_model("tiny-moe-exact", path)
    first, made_at = digest(path), path.stat().st_mtime_ns
    assert make_model("tiny-moe-exact", path, seed=1) == path
    assert path.stat().st_mtime_ns == made_at
    make_model("tiny-moe-exact", path, seed=2)
    assert digest(path) != first
    make_model("tiny-moe-exact", path)
    assert digest(path) == first


def test_truncated_model_and_stale_part_are_made_good(made, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(made("tiny-moe"), path)
    os.truncate(path, path.stat().st_size // 2)
    path.with_name("model.gguf.part").write_bytes(b"left by a killed process" * 1000)
    make_model("tiny-moe", path)
    assert digest(path) == digest(made("tiny-moe"))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"notes", b"", b"GGUF" + bytes(40)])
def test_file_of_somebody_else_is_not_overwritten(source, tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.gguf"):
        make_model("tiny-moe", path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_three_at_once_make_one_good_file(made, tmp_path):
    path = tmp_path / "model.gguf"
    argv = [sys.executable, SYNTH, "--preset", "tiny-moe", "-o", path]
    processes = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    results = [(p.communicate(timeout=120)[1], p.returncode) for p in processes]
    assert [code for _, code in results] == [0, 0, 0], results
    assert digest(path) == digest(made("tiny-moe"))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("existing", [False, True])
def test_interrupted_while_writing_leaves_what_was_there(made, tmp_path, sent, code, existing):
    path = tmp_path / "model.gguf"
    if existing:
        shutil.copyfile(made("tiny"), path)
    part = tmp_path / "model.gguf.part"
    argv = [sys.executable, SYNTH, *BIG, "-o", path]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 4 << 20):
            assert process.poll() is None and time.monotonic() < deadline, "never began to write"
            time.sleep(0.01)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    if existing:
        assert digest(path) == digest(made("tiny"))


def test_disk_full_while_writing_leaves_nothing(source, tmp_path):
    def allow_5_mb():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    done = run("--preset", "tiny-moe", "-o", tmp_path / "model.gguf", preexec_fn=allow_5_mb)
    assert done.returncode == MissingPrerequisite.exit_code, done.stderr
    assert "model.gguf" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_disk_too_small_is_said_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(MissingPrerequisite, match=r"needs 0\.07 GB.* 0\.00 GB free"):
        make_model("tiny-moe", tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_place_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"file/model\.gguf"):
        make_model("tiny-moe", tmp_path / "file" / "model.gguf")


def test_missing_source_says_how_to_get_it(tmp_path):
    done = run("--llama-cpp", tmp_path / "nowhere", "-o", tmp_path / "model.gguf")
    assert done.returncode == MissingPrerequisite.exit_code
    assert "nowhere" in done.stderr and "make source" in done.stderr


@pytest.mark.parametrize("name", ["LLAMA_CPP_DIR", ""])
def test_source_is_found_by_variable_or_own_place(monkeypatch, tmp_path, source, name):
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    assert llama_cpp_dir() == ROOT / "llama.cpp"
    if name:
        monkeypatch.setenv(name, str(tmp_path))
        with pytest.raises(LlamaPhaseError, match=str(tmp_path)):
            llama_cpp_dir()


def test_command_line_prints_sizes_without_writing_and_names_wrong_flags(source, tmp_path):
    dry = run("--preset", "flash-next", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0 and "103.7" in dry.stdout, dry
    wrong = run("--idx-topk", "250", "-o", tmp_path / "model.gguf")
    assert wrong.returncode == UsageError.exit_code and "--idx-ratio 4" in wrong.stderr
    assert run("-o", tmp_path / "model.gguf", "--mtp", "maybe").returncode == UsageError.exit_code
    assert not list(tmp_path.iterdir())
