"""Facts about a machine, no decisions: GPUs with their links, driver, memory, limits.

A fact that cannot be had is None and its reason is in ``Machine.unknown``; probing never raises. The facts round-trip
through JSON, so that those of a server can be planned with elsewhere (`doctor --record FILE`, `plan --facts FILE`).
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from llama_phase.errors import UsageError

UNLIMITED = -1  # of memlock_bytes
_MIB = 1 << 20
_SMI_FIELDS = (
    "index,name,memory.total,memory.free,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,compute_cap,uuid,driver_version"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index`: its number in CUDA, of those that CUDA_VISIBLE_DEVICES leaves. The negotiated PCIe generation
    is that of the moment: an idle GPU lowers it."""

    index: int
    name: str
    vram_total_bytes: int | None = None
    vram_free_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    compute_capability: str | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class Machine:
    """One machine. None is unknown; `unknown` says why, by the name of the fact (or `gpus`)."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None  # the newest that the driver can run
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    memlock_bytes: int | None = None  # UNLIMITED: no limit
    numa_nodes: int | None = None
    hugepages: int | None = None  # reserved ones, of the default size
    hugepage_bytes: int | None = None
    cores: int | None = None
    unknown: dict[str, str] = field(default_factory=dict)


def to_json(machine: Machine) -> str:
    return _adapter().dump_json(machine, indent=1).decode() + "\n"


def from_json(text: str, name: str) -> Machine:
    """Facts recorded with ``to_json``. Raises UsageError (with `name`, the file) when they are none."""
    from pydantic import ValidationError

    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{name} holds no machine facts: {where + ': ' if where else ''}{first['msg']}",
            fix="record them on that machine: `llama-phase doctor --record FILE`",
        ) from None


def _adapter() -> Any:
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(Machine))


def probe(
    *,
    nvml: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
    run: Callable[[Sequence[str]], str] | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """The facts of this machine. Injected: the NVML module, a program runner, the root of /proc and /sys, the variables
    that a server would have."""
    unknown: dict[str, str] = {}
    facts: dict[str, Any] = {}

    def fact(names: str, read: Callable[[], Any]) -> None:
        """Facts of one reading, unknown together; whatever a reading raises is only a reason."""
        try:
            values = read()
            facts.update(zip(names.split(), values, strict=True) if " " in names else [(names, values)])
        except Exception as error:
            reason = str(error) or type(error).__name__
            unknown.update(dict.fromkeys(names.split(), reason[:200]))

    def gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
        try:
            found, *versions = _gpus_of_nvml(nvml())
        except Exception:  # not installed, or no NVIDIA library: the program knows the same
            try:
                found, *versions = _gpus_of_smi(run or _run)
            except FileNotFoundError:
                raise LookupError("neither the NVIDIA library nor nvidia-smi is here") from None
        return visible(found, environment.get("CUDA_VISIBLE_DEVICES")), *versions

    fact("gpus driver_version cuda_version", gpus)
    fact("ram_total_bytes ram_available_bytes", lambda: _memory(root))
    fact("memlock_bytes", _memlock)
    nodes = root / "sys/devices/system/node"
    fact("numa_nodes", lambda: len(list(nodes.glob("node[0-9]*"))) or _absent("NUMA nodes"))
    fact("hugepages hugepage_bytes", lambda: _hugepages((root / "proc/meminfo").read_text()))
    fact("cores", lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    return Machine(**facts, unknown=unknown)


def visible(gpus: Sequence[Gpu], listed: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a program sees with CUDA_VISIBLE_DEVICES=`listed`, numbered as there: numbers, or beginnings of
    UUIDs, up to the first that names none. None: all. Raises LookupError for parts of GPUs (MIG), whose memory is not
    known here. Numbers mean the order of the bus, which is CUDA's when the GPUs are alike or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if listed is None:
        return tuple(gpus)
    seen: list[Gpu] = []
    for item in (part.strip() for part in listed.split(",")):
        if item.startswith("MIG"):
            raise LookupError(f"CUDA_VISIBLE_DEVICES names {item}, a part of a GPU")
        named = [
            gpu for gpu in gpus if (str(gpu.index) == item if item.isdigit() else (gpu.uuid or "").startswith(item))
        ]
        if not item or len(named) != 1 or any(gpu.uuid == named[0].uuid for gpu in seen if gpu.uuid):
            break
        seen.append(named[0])
    return tuple(replace(gpu, index=number) for number, gpu in enumerate(seen))


def _absent(what: str) -> Any:
    raise LookupError(f"the system lists no {what}")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {(done.stdout + done.stderr).strip()[:150]}")
    return done.stdout


def _gpus_of_nvml(nvml: Any) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    nvml.nvmlInit()
    try:

        def ask(function: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, function)(*arguments)
            except Exception:  # NVMLError_NotSupported, or an older library
                return None

        def text(value: Any) -> str | None:
            return value.decode() if isinstance(value, bytes) else value

        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
            gpu = Gpu(
                index,
                text(ask("nvmlDeviceGetName", handle)) or f"GPU {index}",
                memory and int(memory.total),
                memory and int(memory.free),
                ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
                "{}.{}".format(*capability) if capability else None,
                text(ask("nvmlDeviceGetUUID", handle)),
            )
            found.append(gpu)
        cuda = ask("nvmlSystemGetCudaDriverVersion")
        return (
            tuple(found),
            text(ask("nvmlSystemGetDriverVersion")),
            f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    finally:
        nvml.nvmlShutdown()


def _gpus_of_smi(run: Callable[[Sequence[str]], str]) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    found, driver = [], None
    for line in run(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]).splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_SMI_FIELDS.split(",")):
            continue
        numbers = [int(cell) if cell.isdigit() else None for cell in cells]
        total, free = (None if mib is None else mib * _MIB for mib in numbers[2:4])
        capability = cells[8] if cells[8][:1].isdigit() else None
        uuid = cells[9] if cells[9].startswith("GPU-") else None
        gpu = Gpu(numbers[0] or 0, cells[1], total, free, *numbers[4:8], capability, uuid)
        found.append(gpu)
        driver = cells[10]
    return tuple(found), driver, _cuda_of_smi(run)


def _cuda_of_smi(run: Callable[[Sequence[str]], str]) -> str | None:
    words = run(["nvidia-smi"]).replace("|", " ").split()
    for index, word in enumerate(words[:-2]):
        if word == "CUDA" and words[index + 1] == "Version:":
            return words[index + 2]
    return None


def _memory(root: Path) -> tuple[int, int]:
    """Total and available; the limit of a control group (v2) above this process, as a container's, counts when it is
    lower."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _control_groups(root):
        limit = folder / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            used = int((folder / "memory.current").read_text())
            statistics = _numbers((folder / "memory.stat").read_text())
            used -= statistics.get("inactive_file", 0) + statistics.get("active_file", 0)  # page cache gives way
            total, available = min(total, int(text)), min(available, max(int(text) - used, 0))
    return total, available


def _control_groups(root: Path) -> list[Path]:
    """Folders of this process's control group and of those above it; a container sees its own as the root."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = [line[3:].strip("/") for line in lines if line.startswith("0::")]
    own = top / paths[0] if paths else top
    return [own, *(folder for folder in own.parents if folder.is_relative_to(top))]


def _memlock() -> int:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _hugepages(meminfo: str) -> tuple[int, int]:
    numbers = _numbers(meminfo)
    return numbers["HugePages_Total"], numbers["Hugepagesize"] * 1024


def _numbers(text: str) -> Mapping[str, int]:
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def device_memory_mib(pid: int | None) -> float | None:
    """Device memory of a process in MiB, None where it cannot be told."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    used = [float(line.split(",")[1]) for line in lines if line.split(",")[0].strip() == str(pid)]
    if used:
        return sum(used)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return sum(float(line) for line in lines if line.strip().isdigit()) or None
