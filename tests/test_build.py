"""Building: which CPU options, which engine id, what is skipped, what a failure and an interruption leave."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from llama_phase import build as build_module
from llama_phase import build_plan, engine_id, toolchain
from llama_phase.cpu_probe import AMX, EXTENSIONS, LACKING, Probe, attempt_with, cpu_flags, decide, describe, probe
from llama_phase.engine_id import BINARIES, EngineInfo
from llama_phase.errors import BuildError, MissingPrerequisite
from llama_phase.ninja_run import NinjaProgress, eta_text, first_errors, run_logged, run_step
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import Lock
from llama_phase.toolchain import Compiler

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tools" / "cpu_probe.cpp"
ALL = frozenset(flag for extension in EXTENSIONS for flag in extension.cpu_flags)
X86 = platform.machine() == "x86_64"


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return path


# --- CPU probe


def test_everything_works_everything_is_on():
    assert all(outcome.on for outcome in decide(ALL, lambda extension: None).values())


def test_what_the_cpu_lacks_is_not_tried():
    tried: list[str] = []
    outcomes = decide(ALL - {"avx512f"}, lambda extension: tried.append(extension.option))
    assert "AVX512" not in tried and outcomes["AVX512"].reason == LACKING
    assert outcomes["AVX512_VNNI"].reason == "needs AVX512" and outcomes["AVX2"].on


@pytest.mark.parametrize("broken", AMX)
def test_one_broken_amx_part_switches_all_of_it_off(broken):
    outcomes = decide(ALL, lambda extension: "died with SIGILL" if extension.option == broken else None)
    assert not any(outcomes[option].on for option in AMX)
    assert outcomes[broken].reason == "died with SIGILL" and outcomes["AVX512_BF16"].on


def test_exit_codes_are_named():
    assert describe(0, "") is None
    assert describe(1, "") == "wrong result"
    assert describe(-signal.SIGILL, "") == "died with SIGILL"
    assert describe(2, "the kernel does not grant tile data\n") == "the kernel does not grant tile data"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (
            "echo \"g++: error: unrecognized command-line option '-mamx-tile'\" >&2; exit 1",
            "compiler does not know -mamx-tile",
        ),
        ("echo 'x.cpp:1: error: no immintrin.h' >&2; exit 1", "does not compile: x.cpp:1: error: no immintrin.h"),
        ('for o; do :; done; printf \'#!/bin/sh\\nkill -ILL $$\\n\' >"$o"; chmod +x "$o"', "died with SIGILL"),
        ('for o; do :; done; printf \'#!/bin/sh\\nexit 1\\n\' >"$o"; chmod +x "$o"', "wrong result"),
        ('for o; do :; done; printf \'#!/bin/sh\\nexit 0\\n\' >"$o"; chmod +x "$o"', None),
    ],
)
def test_reasons_from_scripted_compilers(tmp_path, compiler, reason):
    command = [str(script(tmp_path / "c++", compiler))]
    tile = next(extension for extension in EXTENSIONS if extension.option == "AMX_TILE")
    assert attempt_with(command, PROGRAM, tmp_path)(tile) == reason


def test_result_is_cached_by_compiler_cpu_and_program(tmp_path):
    program, runs = tmp_path / "p.cpp", []
    program.write_text("1")

    def make_attempt(*_):
        runs.append(1)
        return lambda extension: None

    def run(version: str, has: frozenset[str] = ALL) -> Probe:
        return probe(
            ["c++"], version, program, tmp_path / "cache", machine="x86_64", has=has, make_attempt=make_attempt
        )

    assert run("12.2") == run("12.2") and len(runs) == 1
    run("13.1")
    run("13.1", ALL - {"avx"})
    program.write_text("2")
    run("13.1", ALL - {"avx"})
    assert len(runs) == 4
    (tmp_path / "cache").write_text('{"key": ')
    run("13.1")
    assert len(runs) == 5


def test_other_architectures_pass_native_through(tmp_path):
    result = probe(["c++"], "12", PROGRAM, tmp_path / "cache", machine="aarch64", has=frozenset())
    assert result.cmake_options() == {"GGML_NATIVE": "ON"} and "aarch64" in result.summary()


def test_options_and_summary_follow_the_outcomes():
    result = Probe(decide(ALL, lambda extension: "wrong result" if extension.option == "AMX_INT8" else None))
    options = result.cmake_options()
    assert options["GGML_NATIVE"] == "OFF" and options["GGML_AVX512_BF16"] == "ON"
    assert {options[f"GGML_{option}"] for option in AMX} == {"OFF"} and len(options) == len(EXTENSIONS) + 1
    assert "AMX_INT8 off: wrong result" in result.summary()


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="x86 only")
def test_real_probe_of_this_machine(tmp_path):
    compiler = toolchain.find_compiler(os.environ)
    result = probe(list(compiler.command), compiler.version, PROGRAM, tmp_path / "cache")
    for extension in EXTENSIONS:
        outcome = result.outcomes[extension.option]
        assert not outcome.reason.startswith("does not compile"), f"{extension.option}: {outcome.reason}"
        if not outcome.on and not cpu_flags().issuperset(extension.cpu_flags):
            assert outcome.reason == LACKING
    if compiler.label == "gcc12.2" and "amx_tile" in cpu_flags():
        assert not result.outcomes["AMX_INT8"].on, "GCC 12's tile configuration is known to be broken"
    assert len({result.outcomes[option].on for option in AMX}) == 1


# --- engine id and options


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with a fake cmake and ninja: everything but the compiling is real."""
    root = tmp_path / "check out"
    for path, text in {
        "llama.cpp/CMakeLists.txt": "project(x)\n",
        "llama.cpp/src/a.cpp": "1\n2\n3\n",
        "engine/phase.cpp": "x",
        "engine/tests/t.cpp": "t",
        "patches/series": "",
        "tools/cpu_probe.cpp": "int main() {}",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    from llama_phase.tree import tree_digest

    (root / "llama.cpp.lock").write_text(
        f'tag = "b1"\nbuild_number = 1\ntree_sha256 = "{tree_digest(root / "llama.cpp")}"\n[sdist]\nname = "n"\n'
        'version = "1"\nfile = "f"\nfolder = "llama.cpp"\nsha256 = "0"\n[git]\nrepository = "a/b"\n'
    )
    return root


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    """cmake and ninja as scripts that note their arguments; ``ninja`` makes the binaries and prints status lines."""
    folder = tmp_path / "tools"
    folder.mkdir()
    script(folder / "cmake", f'echo cmake "$@" >> "{tmp_path}/calls"')
    script(
        folder / "ninja",
        f"""
        echo ninja "$@" >> "{tmp_path}/calls"
        cd "$2" && mkdir -p bin
        for b in {" ".join(BINARIES)}; do echo "$b" > "bin/$b"; done
        echo '[1/2] Building CXX object a.cpp.o'; echo '[2/2] Linking b'
    """,
    )
    monkeypatch.setattr(toolchain, "venv_bin", lambda: folder)
    monkeypatch.setattr(toolchain, "find_compiler", lambda environ: Compiler(("c++",), "gcc12.2", "12.2.0"))
    monkeypatch.setattr(build_plan, "probe", lambda *a: Probe(decide(ALL, lambda extension: None)))
    return tmp_path / "calls"


def run_build(root: Path, **options) -> EngineInfo:
    environ = options.pop("environ", {"PATH": os.environ["PATH"]})
    return build_module.build(root=root, environ=environ, console=Console(file=open(os.devnull, "w")), **options)


def calls(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_second_run_does_nothing_and_a_missing_binary_is_made_again(checkout, fake_tools):
    first = run_build(checkout)
    assert [line.split()[0] for line in calls(fake_tools)] == ["cmake", "ninja"]
    assert run_build(checkout) == first and calls(fake_tools) == []
    first.binary("llama-bench").unlink()
    run_build(checkout)
    assert [line.split()[0] for line in calls(fake_tools)] == ["cmake", "ninja"]


def test_id_names_patches_engine_compiler_and_backend(checkout, fake_tools):
    ids = [run_build(checkout).id]
    (checkout / "engine/phase.cpp").write_text("y")
    ids.append(run_build(checkout).id)
    (checkout / "build/src/src/a.cpp").write_text("1\nTWO\n3\n")
    ids.append(run_build(checkout).id)
    assert "+-e" in ids[-1], "an edit that is in no patch shows"
    queue = PatchQueue(checkout, checkout / "llama.cpp", pristine_id=Lock.read(checkout).tree_sha256)
    queue.export(into="one")
    ids.append(run_build(checkout).id)
    assert "+" not in ids[-1] and len(set(ids)) == 4
    assert all(name.startswith("b1-p") and name.endswith("-gcc12.2-cpu") for name in ids)
    (checkout / "engine/tests/t.cpp").write_text("other")
    assert run_build(checkout).id == ids[-1], "tests are not part of the engine"


def test_stock_build_has_no_patches_and_no_engine(checkout, fake_tools):
    run_build(checkout)
    (checkout / "build/src/src/a.cpp").write_text("edited\n")
    calls(fake_tools)
    info = run_build(checkout, stock=True)
    assert info.id == "b1-stock-gcc12.2-cpu" and "LLAMA_PHASE_ENGINE_DIR" not in calls(fake_tools)[0]
    assert (checkout / "build/stock/src/src/a.cpp").read_text() == "1\n2\n3\n"
    assert engine_id.engine_info(stock=True, root=checkout) == info


def test_cmake_arguments_are_passed_on_and_forgotten_when_gone(checkout, fake_tools):
    run_build(checkout, environ={"PATH": os.environ["PATH"], "CMAKE_ARGS": "-DGGML_VULKAN=ON"})
    assert calls(fake_tools)[0].endswith("-DGGML_VULKAN=ON")
    run_build(checkout)
    assert "-UGGML_VULKAN" in calls(fake_tools)[0]
    run_build(checkout)
    assert calls(fake_tools) == []


def test_arguments_of_a_failed_build_are_forgotten_too(checkout, fake_tools, tmp_path):
    ninja = tmp_path / "tools" / "ninja"
    good = ninja.read_text()
    script(ninja, "exit 1")
    with pytest.raises(BuildError):
        run_build(checkout, environ={"PATH": os.environ["PATH"], "CMAKE_ARGS": "-DGGML_VULKAN=ON"})
    ninja.write_text(good)
    calls(fake_tools)
    run_build(checkout)
    assert "-UGGML_VULKAN" in calls(fake_tools)[0]


def test_a_failed_build_is_not_taken_for_done(checkout, fake_tools, tmp_path):
    run_build(checkout)
    (checkout / "engine/phase.cpp").write_text("broken")
    ninja = tmp_path / "tools" / "ninja"
    good = ninja.read_text()
    script(
        ninja, "echo '[1/9] Building'; echo 'FAILED: x.o'; echo \"phase.cpp:3:1: error: 'y' was not declared\"; exit 1"
    )
    with pytest.raises(BuildError, match=r"phase\.cpp:3:1: error: 'y' was not declared") as caught:
        run_build(checkout)
    log = checkout / "build/cpu/build.log"
    assert str(log) in caught.value.fix and "FAILED" in log.read_text()
    with pytest.raises(BuildError, match="not built"):
        engine_id.engine_info(root=checkout)
    ninja.write_text(good)
    (checkout / "engine/phase.cpp").write_text("x")
    run_build(checkout)


def test_only_one_build_per_folder(checkout, fake_tools):
    folder = checkout / "build/cpu"
    folder.mkdir(parents=True)
    with build_module.only_one(folder / ".lock"), pytest.raises(BuildError, match="another build"):
        run_build(checkout)


def test_record_of_another_version_is_ignored(tmp_path):
    (tmp_path / "engine.json").write_text(json.dumps({"id": "x", "unknown": 1}))
    assert engine_id.read(tmp_path) is None


def test_cuda_options():
    options = build_plan.cmake_options(
        Lock.read(ROOT), Probe({}), "c", "cuda", engine_dir=Path("/e"), ccache=True, cuda_architectures="86;90"
    )
    assert options["GGML_CUDA"] == "ON" and options["CMAKE_CUDA_ARCHITECTURES"] == "86;90"
    assert options["CMAKE_CUDA_COMPILER_LAUNCHER"] == "ccache"


def test_automatic_backends_need_toolkit_and_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "has_nvidia_gpu", lambda: False)
    script(tmp_path / "nvcc", "exit 0")
    backends, remark = build_plan.default_backends({"PATH": str(tmp_path), "CUDA_HOME": "/none"})
    assert backends == ["cpu"] and "ENGINE=cuda" in remark
    monkeypatch.setattr(toolchain, "has_nvidia_gpu", lambda: True)
    assert build_plan.default_backends({"PATH": str(tmp_path)})[0] == ["cpu", "cuda"]
    assert build_plan.default_backends({"PATH": "/none", "CUDA_HOME": "/none"}) == (["cpu"], "")


@pytest.mark.parametrize(
    ("listed", "built_for"),
    [("8.6\n8.6\n9.0\n", "86;90"), ("6.1\n8.6\n", "86"), ("12.0\n", "120"), ("[N/A]\n", "86;90")],
)
def test_architectures_of_the_gpus_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, built_for: str
) -> None:
    smi(tmp_path, monkeypatch, listed)
    assert toolchain.cuda_architectures({}) == built_for
    assert toolchain.cuda_architectures({"CUDAARCHS": "61"}) == "61", "the user knows better"


def test_gpus_that_the_kernels_are_not_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "6.1\n6.1\n")
    with pytest.raises(MissingPrerequisite, match=r"capability 6\.1, the engine's kernels need 7\.0"):
        toolchain.cuda_architectures({})
    monkeypatch.setattr(toolchain, "has_nvidia_gpu", lambda: True)
    script(tmp_path / "nvcc", "exit 0")
    backends, remark = build_plan.default_backends({"PATH": str(tmp_path)})
    assert backends == ["cpu"] and "6.1" in remark


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    script(folder / "nvidia-smi", f"cat <<END\n{listed}END")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


# --- tools and environment


@pytest.mark.parametrize("name", ["CC", "CXX"])
def test_stray_compiler_variable_is_named(name):
    with pytest.raises(MissingPrerequisite, match=rf"{name}='/bin/false' is not a compiler") as caught:
        toolchain.find_compiler(os.environ | {name: "/bin/false"})
    assert name in caught.value.fix


def test_empty_compiler_variables_count_as_unset():
    environ = dict(os.environ) | {"CC": "", "CXX": " "}
    assert toolchain.find_compiler(environ).label
    assert not {"CC", "CXX"} & toolchain.build_environment(ROOT, environ).keys()


def test_old_compiler_is_refused(tmp_path):
    command = script(
        tmp_path / "g++",
        "echo '#define __GNUC__ 9'; echo '#define __GNUC_MINOR__ 4'; echo '#define __VERSION__ \"9.4\"'",
    )
    with pytest.raises(MissingPrerequisite, match=r"gcc9\.4, too old"):
        toolchain.identify([str(command)], os.environ)


def test_environment_of_the_build():
    environ = toolchain.build_environment(ROOT, {"PATH": "/usr/bin", "CCACHE_DIR": "/mine", "NINJA_STATUS": "odd "})
    assert environ["CCACHE_DIR"] == "/mine" and environ["CCACHE_BASEDIR"] == str(ROOT) and "NINJA_STATUS" not in environ
    assert environ["GIT_CEILING_DIRECTORIES"] == str(ROOT / "build")
    assert toolchain.build_environment(ROOT, {})["CCACHE_DIR"].endswith(os.path.join("llama-phase", "ccache"))


# --- ninja


def test_progress_and_eta_from_status_lines():
    state = NinjaProgress(started_s=100.0)
    assert state.eta_s(100.0) is None and eta_text(None) == "ETA ?"
    assert not state.feed("warning: [not/a] status")
    assert state.feed("[50/200] Building CXX object src/CMakeFiles/llama.dir/llama-graph.cpp.o")
    assert (state.done, state.total, state.label) == (50, 200, "llama-graph.cpp")
    assert state.eta_s(160.0) == pytest.approx(180.0) and eta_text(180.0) == "ETA 3 min" and eta_text(9.0) == "ETA 9 s"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "[1/2] Building\na.cpp:1: warning: w\na.cpp:2: error: e1\n  note\na.cpp:3: error: e2\n",
            ["a.cpp:2: error: e1", "a.cpp:3: error: e2"],
        ),
        (
            "-- ok\nCMake Error at CMakeLists.txt:3 (x):\n  no such file\n",
            ["CMake Error at CMakeLists.txt:3 (x):", "  no such file"],
        ),
        ("quiet death\n", ["quiet death"]),
        ("", []),
    ],
)
def test_first_errors(log, expected):
    assert first_errors(log) == expected


def test_errors_of_an_earlier_step_are_not_reported(tmp_path):
    log = tmp_path / "log"
    log.write_text("old: error: gone\n")
    with pytest.raises(BuildError) as caught:
        run_step(["sh", "-c", "echo new: error: here; exit 3"], log, os.environ, "compiling", append=True)
    assert "here" in str(caught.value) and "gone" not in str(caught.value) and "exit code 3" in str(caught.value)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_interruption_ends_the_whole_process_group(tmp_path, number, code):
    child = "echo $$; trap 'exit 1' TERM; sleep 300 & echo $!; wait"
    program = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from llama_phase.ninja_run import run_logged
        try:
            run_logged(["sh", "-c", {child!r}], Path({str(tmp_path / "log")!r}), os.environ,
                       on_line=lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        children = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(30) == code
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in children)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_log_holds_everything_the_command_printed(tmp_path):
    lines: list[str] = []
    log = tmp_path / "log"
    assert (
        run_logged(["sh", "-c", "echo out; echo err >&2; printf '\\377\\n'"], log, os.environ, on_line=lines.append)
        == 0
    )
    assert lines[:2] == ["out", "err"] and len(log.read_text().splitlines()) == 3


# --- prerequisites


def test_prerequisites_name_what_is_missing(monkeypatch):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import prerequisites
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert "3.10 or newer" in prerequisites.check_python((3, 8, 1))[0]
    assert "ensurepip" in prerequisites.check_python((3, 12, 0), lambda name: None if name == "ensurepip" else name)[0]
    assert "g++ 11" in prerequisites.check_compiler({}, lambda command: None)[0]
    assert "gcc9" in prerequisites.check_compiler({}, lambda command: "gcc9")[0]
    assert "CXX='nonsense'" in prerequisites.check_compiler({"CXX": "nonsense"}, lambda command: None)[0]
    assert [line.split()[0] for line in prerequisites.check_tools(lambda name: None)] == ["make", "git"]
    assert "6 GB" in prerequisites.check_disk("/", 10**9)[0] and not prerequisites.check_disk("/", 10**11)


@pytest.mark.engine
def test_the_real_engine_reports_its_id():
    try:
        info = engine_id.engine_info(root=ROOT)
    except BuildError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [str(info.binary("llama-server")), "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert info.options["LLAMA_BUILD_COMMIT"] in done.stdout + done.stderr
