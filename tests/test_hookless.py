"""Programs on libllama that call none of our hooks, and the C API for those that do (through phase_api.cpp)."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_server import MIN_TOKENS, PHASE_BIN, ROOT, clean_environment, phase_environment
from synth.gguf_file import llama_cpp_dir, use_gguf_py

pytestmark = pytest.mark.engine

Run = Callable[..., list[dict]]


def compiled(source: str, folder: Path) -> Path:
    """A program of tests/, linked against the engine's libraries."""
    program = folder / Path(source).stem
    tree = PHASE_BIN.parents[1] / "src"
    include = [f"-I{folder}" for folder in (tree / "include", tree / "ggml/include", ROOT / "engine")]
    link = ["-Wl,-rpath," + str(PHASE_BIN), f"-L{PHASE_BIN}", "-lllama", "-lggml", "-lggml-base"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command = ["g++", *flags, *include, ROOT / "tests" / source, "-o", program, *link]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def phase_api(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("phase_api.cpp", tmp_path_factory.mktemp("phase_api"))


@pytest.fixture(scope="module")
def backend_sampling(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    """`backend_sampling(model, GRAPHS=...)`: the tokens that the device sampled."""
    program = compiled("backend_sampling.cpp", tmp_path_factory.mktemp("backend_sampling"))

    def tokens(model: Path, *, off: bool = False, **env: str) -> list[int]:
        environment = clean_environment({} if off else phase_environment(**env))
        done = subprocess.run([program, model], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
        return [int(line) for line in done.stdout.splitlines()]

    return tokens


@pytest.fixture
def run(phase_api: Path, model_path) -> Run:
    """`run("new:126", "decode:600", ..., exit_code=0, FAULT=...)`: the state after each command."""

    def states(*commands: str, exit_code: int = 0, off: bool = False, **env: str) -> list[dict]:
        result = subprocess.run(
            [phase_api, model_path("qwen3moe"), *commands],
            env=clean_environment({} if off else phase_environment(**env)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == exit_code, result.stdout + result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return states


def counts(state: dict, *names: str) -> tuple[int, ...]:
    return tuple(state[name] for name in names)


def test_phase_follows_the_batch_sizes(run: Run) -> None:
    """A long batch enters before it is decoded, one of generation size leaves before it is; between them, all stays."""
    states = run("new:126", "decode:200", "decode:600", "decode:100", "decode:8", "decode:1")
    new, short, long, _, verify, one = states
    assert [state["phase"] for state in states] == ["decode", "decode", "prefill", "prefill", "decode", "decode"]
    assert all(state["result"] == 0 for state in states)
    assert counts(new, "ubatch_decode", "ubatch_prefill", "min_tokens") == (126, 512, 240)
    assert counts(one, "entered", "left", "rolled_back") == (1, 1, 0)
    assert one["events"] == ["entered", "left"]
    assert long["bytes"] > short["bytes"] == verify["bytes"] > 0


def test_a_single_token_after_another_does_not_switch(run: Run) -> None:
    """Reserves happen at a switch only: twenty decodes of one token, one transaction."""
    states = run("new:126", "decode:600", *["decode:1"] * 20)
    assert counts(states[-1], "entered", "left") == (1, 1)


def test_explicit_events_take_over(run: Run) -> None:
    """After the first prompt_begin batch sizes mean nothing any more."""
    prompt_events = ("begin:600", "decode:580", "decode:1", "done")
    states = run("new:126", "begin:100", "done", "decode:600", *prompt_events, "decode:600")
    _, short, done, sized, begin, prompt, one, left, last = states
    assert (short["result"], short["short"], done["result"]) == (126, 1, 0)
    assert sized["phase"] == "decode", "a long batch, but no prompt began"
    assert (begin["result"], begin["phase"]) == (512, "prefill")
    assert prompt["phase"] == one["phase"] == "prefill", "a batch of one, but not the end of the prompt"
    assert (left["phase"], left["result"], left["bytes"]) == ("decode", 0, sized["bytes"])
    assert last["phase"] == "decode"


def test_the_last_few_tokens_of_a_prompt_need_no_prefill_phase(run: Run) -> None:
    """A server cuts them off for a checkpoint; a cut anywhere else changes nothing. One transaction either way."""
    cut_at_end = run("new:126", "begin:600", "decode:596", "decode:4", "done")
    assert [state["phase"] for state in cut_at_end] == ["decode", "prefill", "prefill", "decode", "decode"]
    cut_at_begin = run("new:126", "begin:600", "decode:1", "decode:599", "done")
    assert [state["phase"] for state in cut_at_begin] == ["decode", "prefill", "prefill", "prefill", "decode"]
    for states in (cut_at_end, cut_at_begin):
        assert counts(states[-1], "entered", "left") == (1, 1)


def test_abort_and_end_of_nothing(run: Run) -> None:
    """Abort leaves and is counted; without a prompt in progress both ends do nothing, any number of times."""
    _, nothing, begin, aborted, again, done = run("new:126", "abort", "begin:600", "abort", "abort", "done")
    assert (nothing["result"], nothing["entered"]) == (0, 0)
    assert begin["phase"] == "prefill"
    for state in (aborted, again, done):
        assert state["phase"] == "decode"
        assert counts(state, "entered", "left", "aborted") == (1, 1, 1)


def test_joined_contexts_switch_together(run: Run) -> None:
    """Buffers of both are swapped and counted; a member's own batches decide nothing."""
    states = run(
        *("new:126", "decode:1", "new:126", "decode:1", "use:0", "join:1", "join:1"),
        *("use:1", "decode:600", "use:0", "decode:600", "use:1", "use:0", "decode:1"),
    )
    first, second, joined, again, member = (states[i] for i in (1, 3, 5, 6, 8))
    lead, of_member, left = states[10], states[11], states[13]
    assert (joined["result"], again["result"]) == (1, 0), "joining twice is refused"
    assert member["phase"] == "decode", "the member's long batch"
    assert lead["phase"] == of_member["phase"] == "prefill"
    assert left["phase"] == "decode"
    assert left["bytes"] == first["bytes"] + second["bytes"]
    assert counts(left, "entered", "left") == (1, 1)


def test_join_is_refused(run: Run) -> None:
    """To a context without phases (micro-batch as large as the prefill one), of one, and in the prefill phase."""
    states = run("new:512", "new:126", "join:0", "use:0", "join:1", "new:126", "begin:600", "join:1")
    assert not states[0]["has_phases"] and states[0]["ubatch_prefill"] == 512
    assert [states[i]["result"] for i in (2, 4, 7)] == [0, 0, 0]


def test_reset_lifts_the_block(run: Run) -> None:
    """Three failures in a row block further attempts until reset; results stay right meanwhile."""
    step = "enter.reserve_prefill_buffers"
    again = ("clear", "decode:600")
    states = run("new:126", "decode:600", *again * 3, "reset", *again, "decode:1", FAULT=f"{step}:1,{step}:2,{step}:3")
    assert all(state["result"] == 0 for state in states)
    assert counts(states[-5], "entered", "rolled_back", "blocked") == (0, 3, 1)
    assert counts(states[-1], "entered", "left", "rolled_back", "blocked") == (1, 1, 3, 1)
    assert states[-1]["events"] == [f"rolled_back:{step}"] * 3 + ["entered", "left"]


def test_an_unusable_context_says_so(run: Run) -> None:
    """llama_decode and the events return an error, the reason can be read, and destroying the context does no harm."""
    fault = "leave.reserve_decode_buffers,leave.retry_decode_buffers"
    commands = ("new:126", "decode:600", "decode:1", "decode:600", "begin:600", "done")
    _, long, one, again, begin, done = run(*commands, FAULT=fault, exit_code=75)
    assert long["result"] == 0
    assert one["result"] == again["result"] == -2
    assert begin["result"] == done["result"] == -1
    assert "leave.retry_decode_buffers" in done["failure"]
    assert done["failed"] == 1 and done["events"][-1].startswith("failed:")


def test_without_variables_every_call_is_neutral(run: Run) -> None:
    """As if in the decode phase for good."""
    for state in run("new:126", "begin:600", "decode:600", "done", "abort", "join:0", "reset", off=True):
        assert not state["has_phases"]
        assert counts(state, "ubatch_decode", "ubatch_prefill", "entered", "bytes") == (126, 126, 0, 0)
        assert state["phase"] == "decode" and state["events"] == []
        assert state["result"] == {"begin:600": 126}.get(state["command"], 0)


def test_stats_of_an_older_caller(run: Run) -> None:
    """Nothing beyond the size that the caller was compiled with is written."""
    assert run("new:126", "short")[-1]["result"] == 77


SIZES = ("decode:2", "decode:3") * 3


def test_graphs_kept_for_sizes_count_as_memory(run: Run) -> None:
    """Compute buffers of their own, until the phase that has them ends."""
    states = run("new:126", *SIZES, "figure:kept", "decode:600", "decode:1", "figure:kept")
    assert [state["result"] for state in states if state["command"] == "figure:kept"] == [2, 0]
    assert states[len(SIZES)]["bytes"] > states[1]["bytes"] == states[-1]["bytes"]


def test_kept_graphs_stay_within_the_budget(run: Run) -> None:
    """Buffers that would exceed it are freed again, and batches run as before."""
    large = {"EXPERT_BATCH": "64"}  # of more than a MiB
    roomy = run("new:126", *SIZES, "figure:kept", **large)
    budget = math.floor(roomy[-1]["bytes"] / 2**20)
    assert roomy[-1]["result"] == 2 and roomy[1]["bytes"] < budget * 2**20
    states = run("new:126", *SIZES, "figure:kept", BUDGET_MIB=str(budget), **large)
    assert not any(state["result"] for state in states)
    assert states[-1]["bytes"] == states[1]["bytes"] == roomy[1]["bytes"]


def test_a_scheduler_made_anew_leaves_no_graph_of_before(run: Run) -> None:
    """Outside of a decode, while a kept graph stands in the context's place: it was planned for what has changed."""
    states = run("new:128", *SIZES, "figure:kept", "train", "figure:kept", "decode:2")
    assert [state["result"] for state in states[-4:]] == [2, 0, 0, 0]


def test_llama_bench_switches(engine: Path, model_path) -> None:
    """A program of upstream's, untouched: its prompt runs at the prefill micro-batch."""
    args = ["-p", "1024", "-n", "8", "-b", "512", "-ub", "126", "-r", "1", "-t", "1", "--no-warmup", "-v", "-o", "json"]
    result = subprocess.run(
        [engine / "llama-bench", "-m", model_path("qwen3moe"), "-ngl", "0", *args],
        env=clean_environment(phase_environment(LOG="debug")),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert [row["n_gen"] for row in json.loads(result.stdout)] == [0, 8]
    assert "prefill phase entered" in result.stderr and "ubatch 126 -> 512" in result.stderr
    assert "step enter.reserve_prefill_buffers" in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "host-pool",  # found again by size, nothing used twice, freed in any order
        "lent-buffer",  # one memory for all that are lent it, freed once; what is more comes from elsewhere
    ],
)
def test_memory_of_compute_buffers(engine: Path, tmp_path: Path, name: str) -> None:
    source, program = PHASE_BIN.parents[1] / "src", tmp_path / name
    include = [f"-I{folder}" for folder in (source / "ggml/include", source / "ggml/src", ROOT / "engine")]
    link = ["-Wl,-rpath," + str(PHASE_BIN), f"-L{PHASE_BIN}", "-lggml", "-lggml-base", "-lggml-cpu"]
    flags = ["-std=c++17", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [ROOT / f"tests/{name.replace('-', '_')}.cpp", ROOT / f"engine/{name}.cpp"]
    compiled = subprocess.run(["g++", *flags, *include, *sources, "-o", program, *link], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    result = subprocess.run([program], env=clean_environment({}), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_two_contexts_over_one_model(run: Run) -> None:
    """Same split: interleaved, in the phases of their own batches, each has slots of its own and the scores that it has
    alone without variables. The second goes on when the first is freed."""
    slots = {"EXPERT_SLOTS": "8", "EXPERT_BATCH": "2"}
    n_slots, n_used, n_layer = 8, 4, 8
    batches = ((40, 1, 2, 600, 1, 1, 2, 100), (3, 1, 1, 2, 1, 400, 1, 1, 2, 300, 1))

    def step(n: int) -> tuple[str, ...]:
        return (f"decode:{n}", "scores", "figure:looked_up", "figure:slots_per_layer")

    steps = [[f"use:{i}", *step(n)] for pair in zip(*batches, strict=False) for i, n in enumerate(pair)]
    freed = ["use:0", "free", "use:1", *(part for n in batches[1][len(batches[0]) :] for part in step(n))]
    states = run("raw", "new:126", "new:126", *(part for one in steps for part in one), *freed, **slots)

    context, n_looked_up, scores = 0, [0, 0], [[], []]
    for state in states:
        command, result = state["command"], state["result"]
        if command.startswith("use"):
            context = int(command[-1])
        elif command.startswith("decode"):
            n = int(command.split(":")[1])
            assert (result, state["phase"]) == (0, "prefill" if n >= MIN_TOKENS else "decode")
            if n < MIN_TOKENS:  # the last layer computes one token of each batch
                n_looked_up[context] += n_used * (n * (n_layer - 1) * (n <= 2) + 1)
        elif command == "scores":
            scores[context].append(result)
        elif command == "figure:looked_up":
            assert result == n_looked_up[context]
        elif command == "figure:slots_per_layer":
            assert result == (0 if state["phase"] == "prefill" else n_slots)
    for of_context, sizes in zip(scores, batches, strict=True):
        alone = run("raw", "new:512", *(part for n in sizes for part in (f"decode:{n}", "scores")), off=True)
        assert of_context == [state["result"] for state in alone if state["command"] == "scores"]


def test_copies_of_experts_go_with_the_last_context(run: Run) -> None:
    """Two contexts with slots over one model, whose experts are in a pinned copy (a fault): the copy stays while one
    lives, then the model has its own tensors again, also for a context that comes later."""
    commands = ("raw", "new:126", "decode:40", "decode:1", "top", "new:126", "decode:40", "decode:1", "top", "free")
    commands += (
        "use:0",
        "decode:1",
        "top",
        "free",
        "new:126",
        "decode:40",
        "decode:1",
        "top",
        "decode:1",
        "top",
        "copied",
    )
    slots = {"EXPERT_SLOTS": "8", "EXPERT_BATCH": "1"}
    plain, copied = run(*commands, **slots), run(*commands, FAULT="pin.register:*", **slots)
    assert (plain[-1]["result"], copied[-1]["result"]) == (0, 1)
    for states in (plain, copied):
        tops = [state["result"] for state in states if state["command"] == "top"]
        assert tops[0] == tops[1] == tops[3] and tops[2] == tops[4]
        assert all(state["result"] == 0 for state in states if state["command"].startswith("decode"))
    assert [s["result"] for s in plain[:-1]] == [s["result"] for s in copied[:-1]]


def test_samplers_on_the_device_find_the_inputs_of_their_own_graph(backend_sampling, model_path) -> None:
    """Random numbers go into the graph that was built last, so none is kept beside it."""
    model = model_path("qwen3moe")
    stock = backend_sampling(model, off=True)
    assert len(set(stock)) > 10
    for graphs in ("auto", "0"):
        assert backend_sampling(model, DRAFT="auto", GRAPHS=graphs) == stock


def test_slots_in_a_context_without_memory(backend_sampling, model_path, tmp_path: Path) -> None:
    """A diffusion model has no K/V; experts may be in host memory all the same."""
    use_gguf_py(llama_cpp_dir())
    import gguf

    source = gguf.GGUFReader(model_path("qwen3moe"))
    written = gguf.GGUFWriter(tmp_path / "llada.gguf", "llada-moe")
    for name, entry in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            name, value = name.replace("qwen3moe.", "llada-moe."), entry.contents()
            if entry.types[0] == gguf.GGUFValueType.ARRAY:
                written.add_array(name, value)
            else:
                written.add_key_value(name, value, entry.types[0])
    written.add_key_value("tokenizer.ggml.mask_token_id", 3, gguf.GGUFValueType.UINT32)
    for tensor in source.tensors:
        written.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    model = tmp_path / "llada.gguf"
    assert backend_sampling(model, EXPERT_SLOTS="32") == backend_sampling(model, off=True)
