"""Facts about a machine: read from whatever there is, unknown by name otherwise, never an exception."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_phase.errors import UsageError
from llama_phase.given_machine import read_machine, with_given
from llama_phase.hardware import Gpu, Machine, from_json, probe, to_json, visible

SMI_ROWS = """\
0, NVIDIA GeForce RTX 3090, 24576, 24124, 1, 3, 8, 16, 8.6, GPU-0a1b, 550.54.15
1, Tesla, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], 550.54.15
"""
SMI_TABLE = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n"


def no_nvml() -> Any:
    raise ModuleNotFoundError("pynvml")


def smi(command: Sequence[str]) -> str:
    return SMI_ROWS if len(command) > 1 else SMI_TABLE


class FakeNvml(SimpleNamespace):
    """Answers as nvidia-ml-py; what it lacks raises, as on boards that do not support it."""

    def __init__(self, **other: Any):
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: b"H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=90),
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        }
        super().__init__(**(answers | other))


def test_gpus_by_the_library() -> None:
    machine = probe(nvml=FakeNvml, run=smi)
    assert machine.gpus == (
        Gpu(0, "H200", vram_total_bytes=100, vram_free_bytes=90, pcie_width=16, compute_capability="9.0"),
    )
    assert (machine.driver_version, machine.cuda_version) == ("580.1", "13.1")


def test_gpus_by_the_program_when_the_library_is_not_there_or_fails() -> None:
    def broken() -> None:
        raise RuntimeError("Driver/library version mismatch")

    for nvml in (no_nvml, lambda: FakeNvml(nvmlInit=broken), lambda: FakeNvml(nvmlDeviceGetCount=broken)):
        first, second = probe(nvml=nvml, run=smi).gpus
        assert first == Gpu(0, "NVIDIA GeForce RTX 3090", 24576 << 20, 24124 << 20, 1, 3, 8, 16, "8.6", "GPU-0a1b")
        assert second == Gpu(1, "Tesla"), "what is not available is unknown"
    machine = probe(nvml=no_nvml, run=smi)
    assert (machine.driver_version, machine.cuda_version) == ("550.54.15", "12.4")


@pytest.mark.parametrize(
    ("listed", "uuids"),
    [
        (None, "abc"),
        ("1", "b"),
        ("2,0", "ca"),
        (" 1 , 2 ", "bc"),
        ("GPU-b1", "b"),
        ("GPU-c,GPU-a", "ca"),
        ("GPU-", ""),  # no GPU alone
        ("1,1,2", "b"),  # what was named before ends the list, as does what is not there
        ("0,7,1", "a"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
    ],
)
def test_gpus_that_cuda_visible_devices_leaves(listed: str | None, uuids: str) -> None:
    there = [Gpu(index, f"card {index}", uuid=f"GPU-{letter}1") for index, letter in enumerate("abc")]
    seen = visible(there, listed)
    assert "".join((gpu.uuid or "")[4] for gpu in seen) == uuids
    assert [gpu.index for gpu in seen] == list(range(len(seen))), "the numbers that CUDA gives them"


def test_a_probe_sees_what_a_server_would() -> None:
    masked = probe(nvml=no_nvml, run=smi, environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert [(gpu.index, gpu.name) for gpu in masked.gpus] == [(0, "Tesla")]
    none = probe(nvml=no_nvml, run=smi, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert none.gpus == () and none.driver_version == "550.54.15"
    part = probe(nvml=no_nvml, run=smi, environment={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert part.gpus == () and "MIG-1, a part of a GPU" in part.unknown["gpus"]


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), OSError("failed: no devices"), ValueError("odd")])
def test_a_probe_that_fails_is_an_unknown_with_a_reason(error: Exception, tmp_path: Path) -> None:
    def fails(command: Sequence[str]) -> str:
        raise error

    machine = probe(nvml=no_nvml, run=fails, root=tmp_path)
    assert machine.gpus == () and machine.numa_nodes is None and machine.hugepages is None
    assert {"gpus", "driver_version", "cuda_version", "numa_nodes", "hugepages", "hugepage_bytes"} == set(
        machine.unknown
    )
    assert all(machine.unknown.values())
    assert machine.ram_total_bytes and machine.memlock_bytes is not None and machine.cores


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_system_files_and_the_limit_of_a_container(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 5 kB\nHugePages_Total:      12\nHugepagesize:       2048 kB\n",
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "700000\n",
        "sys/fs/cgroup/memory.stat": "anon 100000\ninactive_file 400000\nactive_file 200000\n",
    }
    lay(tmp_path, files)
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    machine = probe(nvml=no_nvml, run=smi, root=tmp_path)
    assert (machine.hugepages, machine.hugepage_bytes, machine.numa_nodes) == (12, 2048 << 10, 2)
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (1000000, 900000), "page cache gives way"


def test_the_lowest_limit_of_the_control_groups_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n0::/a.slice/b.service\n",
        "sys/fs/cgroup/memory.stat": "anon 0\n",
        "sys/fs/cgroup/a.slice/memory.max": "500000\n",
        "sys/fs/cgroup/a.slice/memory.current": "200000\n",
        "sys/fs/cgroup/a.slice/memory.stat": "inactive_file 50000\n",
        "sys/fs/cgroup/a.slice/b.service/memory.max": "max\n",
    }
    lay(tmp_path, files)
    machine = probe(nvml=no_nvml, run=smi, root=tmp_path)
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (500000, 350000)


numbers = st.none() | st.integers(-1, 1 << 50)
names = st.none() | st.text(max_size=9)


@given(
    st.builds(
        Machine,
        gpus=st.lists(st.builds(Gpu, st.integers(0, 9), st.text(max_size=9), *[numbers] * 6, names), max_size=3).map(
            tuple
        ),
        driver_version=names,
        cuda_version=names,
        ram_total_bytes=numbers,
        memlock_bytes=numbers,
        unknown=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    )
)
def test_facts_survive_json(machine: Machine) -> None:
    assert from_json(to_json(machine), "facts.json") == machine


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "JSON"), ("[]", "facts.json"), ('{"gpu": []}', "gpu"), ('{"gpus": [{"name": "x"}]}', "gpus.0.index")],
)
def test_a_file_without_facts_is_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_machine(path)
    assert word in str(caught.value) and "facts.json" in str(caught.value) and caught.value.fix


def test_recorded_facts_are_plain_json() -> None:
    assert json.loads(to_json(Machine(gpus=(Gpu(0, "x"),))))["gpus"][0]["name"] == "x"


def test_given_numbers_replace_facts_and_no_others() -> None:
    here = Machine(gpus=(Gpu(0, "here", 8, 8, 3, 4, 16, 16),), ram_available_bytes=7, ram_total_bytes=9)
    other = with_given(here, vram="24,16", pcie="3x16,4x8")
    assert [gpu.vram_free_bytes for gpu in other.gpus] == [24 << 30, 16 << 30]
    assert [(gpu.pcie_generation, gpu.pcie_width) for gpu in other.gpus] == [(3, 16), (4, 8)]
    assert other.ram_available_bytes is None, "another machine's memory is not this one's"
    more = with_given(here, ram="1.5")
    assert more.ram_available_bytes == 3 << 29 and more.gpus == here.gpus
    assert with_given(here) == here


@pytest.mark.parametrize(
    "given_",
    [{"vram": ""}, {"vram": "24,x"}, {"vram": "-1"}, {"ram": "nan"}, {"ram": "inf"}, {"pcie": "3"}, {"pcie": "9x16"},
     {"vram": "1,1", "pcie": "3x16,3x16,3x16"}],
)  # fmt: skip
def test_given_numbers_that_are_none_are_refused(given_: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        with_given(Machine(), **given_)
    assert caught.value.fix
