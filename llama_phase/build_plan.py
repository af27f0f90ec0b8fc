"""Decide one build: which tree, which cmake cache variables, which engine id. Prepares the source tree on the way."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from llama_phase import engine_id, toolchain
from llama_phase.cpu_probe import Probe, probe
from llama_phase.download_bar import download_bar
from llama_phase.engine_id import EngineInfo, engine_folder
from llama_phase.errors import MissingPrerequisite
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import Lock, ensure_source
from llama_phase.tree import Mirror


@dataclass(frozen=True)
class Plan:
    """One engine to build: where, from what, and with which cmake cache variables."""

    info: EngineInfo
    source: Path
    options: dict[str, str]
    extra: tuple[str, ...]  # CMAKE_ARGS, after the options so that they win


def cmake_options(
    lock: Lock,
    cpu: Probe,
    commit: str,
    backend: str,
    *,
    engine_dir: Path | None,
    ccache: bool,
    cuda_architectures: str = "",
    cuda_compiler: str = "",
) -> dict[str, str]:
    """Cache variables of a build. ``engine_dir`` is None for the stock reference."""
    number, tag = str(lock.build_number), lock.tag
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "LLAMA_BUILD_NUMBER": number,
        "LLAMA_BUILD_COMMIT": commit,
        "GGML_BUILD_NUMBER": number,
        "GGML_BUILD_COMMIT": tag,
        "GGML_CCACHE": "OFF",
        # libraries find each other by their own place and have one name each, so that a wheel may carry them
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "CMAKE_INSTALL_RPATH_USE_LINK_PATH": "ON",  # CUDA's
        "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
    }
    if ccache:
        options |= {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
    for name in ("TESTS", "EXAMPLES", "UI", "APP"):
        options[f"LLAMA_BUILD_{name}"] = "OFF"
    options |= {
        "LLAMA_BUILD_TOOLS": "ON",
        "LLAMA_BUILD_SERVER": "ON",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "GGML_RPC": "ON",
    }
    options |= cpu.cmake_options()
    if engine_dir is not None:
        options["LLAMA_PHASE_ENGINE_DIR"] = str(engine_dir)
    if backend == "cuda":
        options |= {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": cuda_architectures}
        if cuda_compiler:
            options["CMAKE_CUDA_COMPILER"] = cuda_compiler
        if ccache:
            options["CMAKE_CUDA_COMPILER_LAUNCHER"] = "ccache"
    return options


def default_backends(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Engines to build when none is named, and a remark. CUDA wants toolkit and GPU: it costs an hour of a core."""
    if toolchain.nvcc(environ) is None:
        return ["cpu"], ""
    if not toolchain.has_nvidia_gpu():
        return ["cpu"], "nvcc is here but no NVIDIA GPU: CPU engine only (`make build ENGINE=cuda` builds both)"
    try:
        toolchain.cuda_architectures(environ)
    except MissingPrerequisite as error:
        return ["cpu"], f"{error}: CPU engine only"
    return ["cpu", "cuda"], ""


def make_plan(root: Path, backend: str, stock: bool, environ: Mapping[str, str], console: Console) -> Plan:
    """Prepare the source tree and decide all options."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    lock = Lock.read(root)
    compiler = toolchain.find_compiler(environ)
    for tool in ("cmake", "ninja"):
        toolchain.require_tool(tool, environ)
    cuda_compiler = toolchain.nvcc(environ) if backend == "cuda" else None
    if backend == "cuda" and cuda_compiler is None:
        raise MissingPrerequisite("nvcc is not found", fix="install the CUDA toolkit, or set CUDACXX or CUDA_HOME")
    pinned = ensure_source(root, environ=environ, report=say, progress=download_bar(console))
    folder = engine_folder(root, backend, stock)
    patches = engine = ""
    if stock:
        source = root / "build" / "stock" / "src"
        outcome = Mirror.load(pinned.path, source, source.with_name("src.json")).apply(
            pinned.tree_sha256, "", {}, discard=True
        )
        commit = engine_id.stock_commit(compiler.label, backend)
    else:
        queue = PatchQueue(root, pinned.path, pristine_id=pinned.tree_sha256)
        outcome, source = queue.prepare(), queue.source
        if outcome.edited:
            say(f"edits that are in no patch yet are built, too: {', '.join(outcome.edited)}")
        patches, edited = engine_id.patches_digest(queue)
        engine = engine_id.engine_digest(root)
        commit = engine_id.build_commit(patches, edited, engine, compiler.label, backend)
    cpu = probe(
        list(compiler.command), compiler.version, root / "tools" / "cpu_probe.cpp", root / "build" / "cpu-probe.json"
    )
    ccache = toolchain.find_tool("ccache", environ) is not None
    options = cmake_options(
        lock,
        cpu,
        commit,
        backend,
        engine_dir=None if stock else root / "engine",
        ccache=ccache,
        cuda_architectures=toolchain.cuda_architectures(environ) if backend == "cuda" else "",
        cuda_compiler=str(cuda_compiler or ""),
    )
    extra = shlex.split(environ.get("CMAKE_ARGS", ""))
    info = EngineInfo(
        id=f"{lock.tag}-{commit}",
        tag=lock.tag,
        backend=backend,
        stock=stock,
        compiler=compiler.label,
        patches_sha256=patches,
        engine_sha256=engine,
        tree_sha256=pinned.tree_sha256,
        options=options
        | {"CMAKE_ARGS": shlex.join(extra), "CXX": f"{shlex.join(compiler.command)} {compiler.version}"},
        cpu=cpu.summary(),
        cpu_options={option: outcome.reason for option, outcome in cpu.outcomes.items()},
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        folder=str(folder),
    )
    return Plan(info, source, options, tuple(extra))
