"""The engine id, and the record of a built engine (build/<backend>/engine.json).

b11434-p1a2b3c4d-e5f60718-gcc12.2-cpu
tag    | digest  | digest  | compiler | backend
       | of the  | of engine/
       | patches (a trailing + : build/src also has edits that are in no patch)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llama_phase.errors import BuildError
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import project_root
from llama_phase.tree import scan, sha256_bytes, write_atomically

BINARIES = ("llama-server", "llama-bench", "ggml-rpc-server")


@dataclass(frozen=True)
class EngineInfo:
    """A built engine. ``binaries``: size in bytes of every file in its bin folder when it was recorded."""

    id: str
    tag: str
    backend: str
    stock: bool
    compiler: str
    patches_sha256: str
    engine_sha256: str
    tree_sha256: str
    options: dict[str, str]
    cpu: str
    cpu_options: dict[str, str]
    date: str
    folder: str
    binaries: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.id

    def binary(self, name: str) -> Path:
        """Path of ``llama-server``, ``llama-bench`` or ``ggml-rpc-server``."""
        return Path(self.folder) / "bin" / name

    def intact(self) -> bool:
        return bool(self.binaries) and bin_sizes(Path(self.folder)) == self.binaries


def engine_folder(root: Path, backend: str, stock: bool) -> Path:
    return root / "build" / "stock" / backend if stock else root / "build" / backend


def bin_sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files in ``folder``/bin, links followed; a broken link counts as missing."""
    if not (folder / "bin").is_dir():
        return {}
    return {path.name: path.stat().st_size for path in sorted((folder / "bin").iterdir()) if path.is_file()}


def engine_digest(root: Path) -> str:
    """Digest of what is compiled from engine/: its tests and texts do not count."""
    folder = root / "engine"
    names = sorted(p for p in scan(folder) if not p.startswith("tests/") and not p.endswith((".md", ".pyc", "~")))
    return sha256_bytes("".join(f"{name}\0{sha256_bytes((folder / name).read_bytes())}\n" for name in names).encode())


def patches_digest(queue: PatchQueue) -> tuple[str, bool]:
    """(digest of the patches and of edits in the source that are in no patch, whether there are such edits)."""
    found = queue.difference()
    loose = sorted([*found.edited, *found.extra])
    digest = queue.digest()
    if not loose:
        return digest, False
    contents = "".join(f"{path}\0{sha256_bytes((queue.source / path).read_bytes())}\n" for path in loose)
    return sha256_bytes(f"{digest}\n{contents}".encode()), True


def build_commit(patches: str, edited: bool, engine: str, compiler: str, backend: str) -> str:
    """What upstream prints after "b<number>-"."""
    return f"p{patches[:8]}{'+' if edited else ''}-e{engine[:8]}-{compiler}-{backend}"


def stock_commit(compiler: str, backend: str) -> str:
    return f"stock-{compiler}-{backend}"


def save(info: EngineInfo) -> None:
    write_atomically(Path(info.folder) / "engine.json", (json.dumps(asdict(info), indent=1) + "\n").encode())


def read(folder: Path) -> EngineInfo | None:
    """The record in ``folder``; None when there is none that this version can read."""
    try:
        return EngineInfo(**json.loads((folder / "engine.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def engine_info(backend: str = "cpu", *, stock: bool = False, root: Path | None = None) -> EngineInfo:
    """The built engine; raises BuildError when it is not built to the end, or when its binaries are gone.

    ``auto`` is the CUDA engine if it is built, else the CPU engine.
    """
    root = root or project_root()
    if backend == "auto":
        cuda = read(engine_folder(root, "cuda", stock))
        backend = "cuda" if cuda is not None and cuda.intact() else "cpu"
    folder = engine_folder(root, backend, stock)
    info = read(folder)
    verb = "make stock" if stock else "make build" + ("" if backend == "cpu" else f" ENGINE={backend}")
    if info is None or not info.binaries:
        raise BuildError(
            f"the {'stock ' if stock else ''}{backend} engine is not built, or not to the end, in {folder}",
            fix=f"`{verb}`",
        )
    missing = [name for name in BINARIES if not info.binary(name).is_file()]
    if missing:
        raise BuildError(f"{folder / 'bin'} lacks {', '.join(missing)}", fix=f"`{verb}`")
    return info
