"""Read-only checks of a machine, an engine and a model. A check judges facts it is given; ``examine`` gathers them.

Nothing is started, written, reaped or bound for longer than a moment. A fact that is unknown is said to be so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_phase.engine_id import EngineInfo, engine_folder, read
from llama_phase.errors import LlamaPhaseError
from llama_phase.gguf_facts import ModelFacts, read_facts
from llama_phase.hardware import UNLIMITED, Machine
from llama_phase.port import check_port
from llama_phase.running_servers import same_process

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MIN_FREE_DISK_BYTES = 1 << 30  # logs, and what a rebuild of one patch takes


@dataclass(frozen=True)
class Check:
    """One line. `fix` is the next thing to do, empty when there is nothing."""

    name: str
    result: str
    text: str
    fix: str = ""


def exit_code(checks: Iterable[Check]) -> int:
    return 1 if any(check.result == PROBLEM for check in checks) else 0


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def check_driver(machine: Machine, cuda_engine: bool) -> Check:
    if machine.gpus:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        return Check("driver", OK, f"{machine.driver_version or 'version unknown'}, {names}")
    reason = machine.unknown.get("gpus", "the driver lists none")
    fix = "install the NVIDIA driver, then `nvidia-smi` should list the GPUs"
    return Check("driver", PROBLEM if cuda_engine else WARNING, f"no NVIDIA GPU can be seen: {reason}", fix)


def check_cuda(machine: Machine, engine_cuda: str | None, architectures: str) -> Check:
    """`engine_cuda`: the toolkit version the engine was compiled with, None when unknown."""
    wanted = {int(number) for number in re.findall(r"\d+", architectures)}
    missing = [
        f"{gpu.name} ({gpu.compute_capability})"
        for gpu in machine.gpus
        if wanted and gpu.compute_capability and not _runs_on(gpu.compute_capability, wanted)
    ]
    if missing:
        text = f"the engine is compiled for {architectures}, not for {', '.join(missing)}"
        return Check("cuda", PROBLEM, text, "`make build ENGINE=cuda` on this machine")
    if engine_cuda is None or machine.cuda_version is None:
        what = "of the engine" if engine_cuda is None else "of the driver"
        return Check("cuda", WARNING, f"the CUDA version {what} is unknown", "compare `nvidia-smi`, `nvcc --version`")
    driver, engine = (tuple(map(int, text.split(".")[:2])) for text in (machine.cuda_version, engine_cuda))
    text = f"the driver runs CUDA {machine.cuda_version}, the engine was compiled with {engine_cuda}"
    if driver[0] < engine[0]:
        fix = f"update the driver, or build with CUDA {driver[0]}: CUDACXX=.../nvcc make build ENGINE=cuda"
        return Check("cuda", PROBLEM, text, fix)
    if driver < engine:  # the same major version runs, but for code the driver would have to compile
        return Check("cuda", WARNING, text, "update the driver if the engine reports an unsupported PTX version")
    return Check("cuda", OK, text)


def _runs_on(capability: str, architectures: set[int]) -> bool:
    """Machine code runs within a major version; the virtual code beside it runs on all that is newer."""
    return any(architecture <= int(capability.replace(".", "")) for architecture in architectures)


def check_pcie(machine: Machine) -> Iterator[Check]:
    for gpu in machine.gpus:
        name = f"pcie {gpu.index}"
        now = f"generation {gpu.pcie_generation or 'unknown'}, {gpu.pcie_width or 'unknown'} lanes"
        best = f"{gpu.pcie_generation_max or 'unknown'} and {gpu.pcie_width_max or 'unknown'}"
        text = f"{now}; possible: {best}"
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            fix = "use a slot with all lanes, reseat the card, or look at riser and bifurcation settings"
            yield Check(name, WARNING, text, fix)
        elif gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
            fix = "an idle GPU lowers it: look again under load; if it stays, look at the BIOS setting of the slot"
            yield Check(name, WARNING, text, fix)
        elif not (gpu.pcie_generation and gpu.pcie_width):
            yield Check(name, WARNING, text, "`nvidia-smi -q` may say more; virtual machines often hide the link")
        else:
            yield Check(name, OK, text)


def check_memlock(machine: Machine, pinned_bytes: int | None) -> Check:
    """`pinned_bytes` None: no model was named."""
    limit = machine.memlock_bytes
    if limit is None:
        return Check("memlock", WARNING, "the limit of locked memory is unknown", "`ulimit -l` shows it")
    shown = "no limit" if limit == UNLIMITED else _gib(limit) if limit >= 1 << 30 else f"{limit >> 10} KiB"
    if pinned_bytes is None or limit == UNLIMITED or limit >= pinned_bytes:
        return Check(
            "memlock", OK, shown if pinned_bytes is None else f"{shown}, {_gib(pinned_bytes)} are to be pinned"
        )
    text = f"the limit is {shown}, {_gib(pinned_bytes)} are to be pinned; not every driver counts that"
    fix = "`ulimit -l unlimited`; for good: memlock in /etc/security/limits.conf, or LimitMEMLOCK="
    return Check("memlock", WARNING, text, fix)


def check_ram(machine: Machine, facts: ModelFacts | None) -> Check:
    available = machine.ram_available_bytes
    if available is None:
        return Check("ram", WARNING, "free memory is unknown", "`free -g` shows it")
    if facts is None:
        return Check("ram", OK, f"{_gib(available)} available; name a model to compare")
    need = facts.experts_bytes
    text = f"{_gib(available)} available, the experts take {_gib(need)}"
    if available < need:
        return Check("ram", PROBLEM, text, f"free or add {_gib(need - available)}, or use a smaller quantization")
    if available < need + facts.input_bytes:
        tables = f"; embedding tables of {_gib(facts.input_bytes)} more will be read from disk again and again"
        fix = f"{_gib(need + facts.input_bytes - available)} more memory avoids it"
        return Check("ram", WARNING, text + tables, fix)
    return Check("ram", OK, text)


def check_numa(machine: Machine) -> Check:
    if machine.numa_nodes is None:
        return Check("numa", WARNING, "the number of NUMA nodes is unknown", "`lscpu` shows it")
    if machine.numa_nodes > 1:
        text = f"{machine.numa_nodes} nodes: experts far from a GPU cross the socket link"
        return Check("numa", WARNING, text, "try `numactl --interleave=all llama-phase serve ...` and compare")
    return Check("numa", OK, "one node")


def check_hugepages(machine: Machine) -> Check:
    """Reserved huge pages are taken from all other memory and a mapped model does not use them."""
    if machine.hugepages is None:
        return Check("hugepages", OK, "unknown, and not needed")
    reserved = machine.hugepages * (machine.hugepage_bytes or 0)
    if reserved >= 1 << 30:
        fix = "give them back unless something else needs them: sysctl vm.nr_hugepages=0"
        return Check("hugepages", WARNING, f"{_gib(reserved)} are reserved, which a model cannot use", fix)
    return Check("hugepages", OK, "none reserved that matter")


def check_engine(engines: dict[str, EngineInfo | None]) -> Check:
    built = [info for info in engines.values() if info is not None]
    if not built:
        return Check("engine", PROBLEM, "no engine is built", "`llama-phase build`")
    for info in built:
        fix = f"`llama-phase build --backend {info.backend}`"
        if not info.binary("llama-server").is_file():
            return Check("engine", PROBLEM, f"{info.binary('llama-server')} is gone", fix)
        if not info.intact():
            return Check(
                "engine", WARNING, f"the {info.backend} engine's files are not those of its last full build", fix
            )
    return Check("engine", OK, ", ".join(info.id for info in built))


def check_binary(path: Path) -> Check:
    if path.is_file() and os.access(path, os.X_OK):
        return Check("engine", OK, f"LLAMA_PHASE_SERVER_BINARY is {path}")
    fix = "correct LLAMA_PHASE_SERVER_BINARY, or unset it to use the built engine"
    return Check("engine", PROBLEM, f"LLAMA_PHASE_SERVER_BINARY is no program: {path}", fix)


def check_stale(folder: Path) -> Check:
    """Records of servers whose supervisor is gone. Only looked at: `serve` ends and removes them."""
    alive, dead = [], 0
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if same_process(int(record["owner"]), record["owner_birth"]):
                continue
            if same_process(int(record["pid"]), record["birth"]):
                alive.append(int(record["pid"]))
                continue
        except (OSError, ValueError, KeyError, TypeError):
            pass
        dead += 1
    if alive:
        pids = ", ".join(map(str, alive))
        text = f"servers without a supervisor still run: pid {pids}"
        return Check("stale servers", PROBLEM, text, f"the next `llama-phase serve` ends them, or `kill {alive[0]}`")
    if dead:
        text = f"{dead} records of servers that are gone"
        return Check("stale servers", WARNING, text, "the next `llama-phase serve` removes them")
    return Check("stale servers", OK, "none")


def check_disk(name: str, folder: Path, free_bytes: int | None) -> Check:
    if free_bytes is None:
        return Check(name, WARNING, f"free space for {folder} is unknown", f"`df -h {folder}` shows it")
    text = f"{_gib(free_bytes)} free for {folder}"
    if free_bytes < MIN_FREE_DISK_BYTES:
        return Check(name, WARNING, text, "free some: logs are written there")
    return Check(name, OK, text)


def check_port_free(hosts: Iterable[str], port: int) -> Check:
    if port == 0:
        return Check("port", OK, "any free one")
    try:
        check_port(hosts, port)
    except LlamaPhaseError as error:
        return Check("port", PROBLEM, str(error), error.fix)
    return Check("port", OK, f"{port} is free")


def check_model_file(path: Path) -> tuple[Check, ModelFacts | None]:
    """Shards there and complete, contents that can be served."""
    try:
        facts = read_facts(path)
    except LlamaPhaseError as error:
        return Check("model", PROBLEM, str(error), error.fix), None
    shards = f"{facts.n_shards} files" if facts.n_shards > 1 else "one file"
    return Check("model", OK, f"{facts.name}: {shards}, complete, {_gib(facts.file_bytes)}"), facts


def examine(
    machine: Machine,
    *,
    root: Path,
    state: Path,
    hosts: Iterable[str] = ("127.0.0.1",),
    port: int = 8080,
    model: Path | None = None,
    binary: Path | None = None,
) -> list[Check]:
    """All checks.

    `root`: of the project, where engines are built; `state`: the folder of logs and records; `binary`: a llama-server
    of the user's own in place of a built engine; `port` 0: any.
    """
    engines = {backend: read(engine_folder(root, backend, stock=False)) for backend in ("cpu", "cuda")}
    cuda = engines["cuda"]
    checks = [check_engine(engines) if binary is None else check_binary(binary)]
    checks.append(check_driver(machine, cuda is not None))
    if cuda is not None:
        compiled_with = cuda_of_build(Path(cuda.folder))
        checks.append(check_cuda(machine, compiled_with, cuda.options.get("CMAKE_CUDA_ARCHITECTURES", "")))
    checks += check_pcie(machine)
    facts = None
    if model is not None:
        check, facts = check_model_file(model)
        checks.append(check)
    if model is None or facts is not None:
        checks += [check_ram(machine, facts), check_memlock(machine, facts and facts.experts_bytes)]
    checks += [check_numa(machine), check_hugepages(machine), check_port_free(hosts, port)]
    checks += [check_stale(state / "running"), check_disk("disk", state, free_disk(state))]
    return checks


def cuda_of_build(folder: Path) -> str | None:
    """Version of the toolkit that compiled the engine in `folder`, as CMake recorded it."""
    for path in folder.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        match = re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', path.read_text(errors="replace"))
        if match:
            return match[1]
    return None


def free_disk(folder: Path) -> int | None:
    """Free bytes for `folder`, which need not exist yet."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
