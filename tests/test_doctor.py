"""The doctor's checks: each names what it saw, gives a fix where there is one, and changes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_gguf import write_gguf
from sparse_gguf import write_flash_next

from llama_phase import doctor, engine_id
from llama_phase.doctor import OK, PROBLEM, WARNING, Check, exit_code
from llama_phase.engine_id import EngineInfo
from llama_phase.gguf_facts import read_facts
from llama_phase.hardware import UNLIMITED, Gpu, Machine, from_json
from llama_phase.running_servers import birth_of

GIB = 1 << 30
CARD = Gpu(0, "RTX 3090", 24 * GIB, 24 * GIB, 3, 3, 16, 16, "8.6")
GOOD = Machine(
    gpus=(CARD,),
    driver_version="550",
    cuda_version="12.4",
    ram_total_bytes=256 * GIB,
    ram_available_bytes=200 * GIB,
    memlock_bytes=UNLIMITED,
    numa_nodes=1,
    hugepages=0,
    hugepage_bytes=2 << 20,
    cores=16,
)


def built(folder: Path, backend: str = "cpu") -> EngineInfo:
    home = folder / "build" / backend
    (home / "bin").mkdir(parents=True)
    for name in engine_id.BINARIES:
        (home / "bin" / name).write_bytes(b"x")
    options = {"CMAKE_CUDA_ARCHITECTURES": "86;90"} if backend == "cuda" else {}
    sizes = engine_id.bin_sizes(home)
    info = EngineInfo(f"id-{backend}", "b1", backend, False, "gcc12", "", "", "", options, "", {}, "", str(home), sizes)
    engine_id.save(info)
    return info


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_good_machine_is_all_ok(tmp_path: Path) -> None:
    built(tmp_path)
    cuda = built(tmp_path, "cuda")
    folder = Path(cuda.folder) / "CMakeFiles" / "3.30.0"
    folder.mkdir(parents=True)
    (folder / "CMakeCUDACompiler.cmake").write_text('set(CMAKE_CUDA_COMPILER_VERSION "12.4.131")\n')
    model = write_flash_next(tmp_path, layers=4, n_expert=8, shards=2)
    before = sorted(tmp_path.rglob("*"))
    checks = doctor.examine(GOOD, root=tmp_path, state=tmp_path / "state", port=0, model=model)
    assert [check for check in checks if check.result != OK] == [] and exit_code(checks) == 0
    assert not any(check.fix for check in checks)
    assert {"engine", "driver", "cuda", "pcie 0", "model", "ram", "memlock", "numa", "hugepages", "port",
            "stale servers", "disk"} == {check.name for check in checks}  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before, "it only looks"


def test_nothing_is_known_and_nothing_raises(tmp_path: Path) -> None:
    built(tmp_path, "cuda")
    checks = doctor.examine(Machine(unknown={"gpus": "no nvidia-smi"}), root=tmp_path, state=tmp_path, port=0)
    by_name = {check.name: check for check in checks}
    assert by_name["driver"].result == PROBLEM and "no nvidia-smi" in by_name["driver"].text
    for name in ("cuda", "ram", "memlock", "numa"):
        assert by_name[name].result == WARNING and "unknown" in by_name[name].text and by_name[name].fix


@pytest.mark.parametrize(
    ("check", "result", "word"),
    [
        (doctor.check_driver(Machine(), cuda_engine=False), WARNING, "no NVIDIA GPU"),
        (doctor.check_cuda(GOOD, "12.4", "86;90"), OK, "12.4"),
        (doctor.check_cuda(GOOD, "13.0", "86;90"), PROBLEM, "13.0"),
        (doctor.check_cuda(GOOD, "12.9", "86;90"), WARNING, "12.9"),
        (doctor.check_cuda(GOOD, "11.8", "86;90"), OK, "11.8"),
        (doctor.check_cuda(GOOD, "12.4", "90"), PROBLEM, "8.6"),
        (doctor.check_cuda(GOOD, "12.4", "80-real"), OK, "12.4"),
        (doctor.check_cuda(GOOD, None, ""), WARNING, "engine is unknown"),
        (doctor.check_memlock(replace(GOOD, memlock_bytes=8 << 20), 60 * GIB), WARNING, "8192 KiB"),
        (doctor.check_memlock(replace(GOOD, memlock_bytes=64 * GIB), 60 * GIB), OK, "60.0 GiB"),
        (doctor.check_numa(replace(GOOD, numa_nodes=2)), WARNING, "2 nodes"),
        (doctor.check_hugepages(replace(GOOD, hugepages=4096)), WARNING, "8.0 GiB"),
        (doctor.check_disk("disk", Path("/x"), 5 << 20), WARNING, "/x"),
        (doctor.check_engine({"cpu": None, "cuda": None}), PROBLEM, "no engine"),
    ],
)
def test_judgement(check: Check, result: str, word: str) -> None:
    assert (check.result, word in check.text) == (result, True), check
    assert bool(check.fix) == (result != OK)


@pytest.mark.parametrize(
    ("gpu", "result", "word"),
    [
        (CARD, OK, "generation 3"),
        (replace(CARD, pcie_width=4), WARNING, "4 lanes"),
        (replace(CARD, pcie_generation=1), WARNING, "generation 1"),
        (replace(CARD, pcie_generation=None, pcie_width=None), WARNING, "unknown"),
    ],
)
def test_a_link_below_what_is_possible(gpu: Gpu, result: str, word: str) -> None:
    (check,) = doctor.check_pcie(Machine(gpus=(gpu,)))
    assert check.result == result and word in check.text and bool(check.fix) == (result != OK)


def test_an_idle_gpus_low_generation_is_no_call_for_a_screwdriver() -> None:
    (check,) = doctor.check_pcie(Machine(gpus=(replace(CARD, pcie_generation=1),)))
    assert "idle" in check.fix and "reseat" not in check.fix


def test_memory_against_the_model(tmp_path: Path) -> None:
    facts = read_facts(write_flash_next(tmp_path, layers=8, ple_rows=100_000_000))
    experts, tables = facts.experts_bytes, facts.input_bytes

    def check(available: int) -> Check:
        return doctor.check_ram(replace(GOOD, ram_available_bytes=available), facts)

    assert check(experts - 1).result == PROBLEM
    assert check(experts + 1).result == WARNING and "tables" in check(experts + 1).text
    assert check(experts + tables).result == OK


def test_model_that_is_incomplete_or_missing(tmp_path: Path) -> None:
    path = write_flash_next(tmp_path, layers=4, n_expert=8, shards=3)
    (tmp_path / "flash-00003-of-00003.gguf").unlink()
    check, facts = doctor.check_model_file(path)
    assert check.result == PROBLEM and "00003-of-00003" in check.text and check.fix and facts is None
    assert doctor.check_model_file(tmp_path / "none.gguf")[0].result == PROBLEM


def test_engine_files_that_changed_or_are_gone(tmp_path: Path) -> None:
    info = built(tmp_path)
    binary = info.binary("llama-server")
    binary.write_bytes(b"longer")
    assert doctor.check_engine({"cpu": info}).result == WARNING
    binary.unlink()
    gone = doctor.check_engine({"cpu": info})
    assert gone.result == PROBLEM and str(binary) in gone.text and "build" in gone.fix
    assert doctor.check_binary(binary).result == PROBLEM


def test_a_taken_port_is_a_problem_with_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        check = doctor.check_port_free(["127.0.0.1"], taken.getsockname()[1])
    assert check.result == PROBLEM and str(os.getpid()) in check.text and check.fix


def test_stale_servers_are_found_and_left_alone(tmp_path: Path) -> None:
    assert doctor.check_stale(tmp_path / "none").result == OK
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        us = {"owner": os.getpid(), "owner_birth": birth_of(os.getpid())}
        orphan = {"owner": dead_pid(), "owner_birth": 1.0}
        server = {"pid": child.pid, "birth": birth_of(child.pid)}
        record = tmp_path / "1.json"
        for content, result in (
            (json.dumps(server | us), OK),
            (json.dumps(server | orphan), PROBLEM),
            (json.dumps({"pid": child.pid, "birth": 1.0} | orphan), WARNING),
            ("not json", WARNING),
            ("[]", WARNING),
        ):
            record.write_text(content)
            check = doctor.check_stale(tmp_path)
            assert (check.result, record.read_text()) == (result, content), content
            assert result != PROBLEM or str(child.pid) in check.text
        assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_exit_code_is_1_only_for_a_problem() -> None:
    ok, warning, problem = (Check("x", result, "") for result in (OK, WARNING, PROBLEM))
    assert [exit_code(checks) for checks in ([], [ok, warning], [ok, problem])] == [0, 0, 1]


def test_doctor_command_records_facts_and_changes_nothing_else(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    state = tmp_path / "state"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "GGML_"))}
    environment["LLAMA_PHASE_STATE_DIR"] = str(state)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llama_phase.cli", "doctor", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    facts = tmp_path / "facts.json"
    done = run(str(model), "--port", "0", "--json", "--record", str(facts))
    said = json.loads(done.stdout)
    assert done.returncode == exit_code([Check(**check) for check in said["checks"]])
    assert json.loads(json.dumps(asdict(from_json(facts.read_text(), "facts")))) == said["machine"]
    assert not state.exists()
    done = run(str(tmp_path / "none.gguf"), "--port", "0")
    assert done.returncode == 1 and "none.gguf" in done.stdout and "Traceback" not in done.stderr
    done = run("--record", str(tmp_path / "no" / "folder.json"))
    assert done.returncode == 1 and "error: cannot write" in done.stderr
