"""Sizes and offsets of the structs of a ctypes binding, to be compared with what a C compiler says of them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def structs_of(module: ModuleType) -> dict[str, type[ctypes.Structure]]:
    """The structs that name their fields, by their C name; opaque ones have none."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, ctypes.Structure)
        and value is not ctypes.Structure
        and getattr(value, "_fields_", None)
    }


def layout_in_python(structs: dict[str, type[ctypes.Structure]]) -> dict[str, int]:
    """`name` -> size, `name.field` -> offset, in bytes."""
    layout = {name: ctypes.sizeof(struct) for name, struct in structs.items()}
    for name, struct in structs.items():
        for field, kind, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            # a union has no name of its own in llama.h: its members are the struct's
            members = [member[0] for member in kind._fields_] if issubclass(kind, ctypes.Union) else [field]
            layout |= {f"{name}.{member}": offset for member in members}
    return layout


def layout_in_c(names: Iterable[str], includes: list[Path], folder: Path) -> dict[str, int]:
    """The same of llama.h, by a compiled program. A struct or field that llama.h lacks fails to compile."""
    lines = []
    for name in names:
        struct, _, field = name.partition(".")
        what = f"offsetof(struct {struct}, {field})" if field else f"sizeof(struct {struct})"
        lines.append(f'    printf("{name} %zu\\n", {what});')
    source, program = folder / "layout.c", folder / "layout"
    body = "\n".join(lines)
    source.write_text(f'#include "llama.h"\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{\n{body}\n}}\n')
    command = ["gcc", *(f"-I{folder}" for folder in includes), str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split() for line in printed.splitlines())}
