#!/usr/bin/env python3
"""Make engine/phase-env.inc and docs/env.md from the registry llama_phase/env.toml.

usage: gen_env.py            write both files
       gen_env.py --check    exit 1 and name the file when one is out of date

exit codes: 0 written or up to date, 1 out of date, 2 the registry is malformed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
REGISTRY = ROOT / "llama_phase" / "env.toml"
KINDS = {"choice", "int", "int_or_auto", "int_list", "text", "bool"}
ABOUT = {
    "text": "text",
    "bool": "`0/1`, `on/off`, `true/false`",
}


def load() -> list[dict]:
    """The registry's rows, checked. Raises ValueError naming the row and what is wrong with it."""
    rows = tomllib.loads(REGISTRY.read_text())["variable"]
    for row in rows:
        name = row.get("name", "?")
        missing = {"name", "scope", "kind", "default", "meaning"} - row.keys()
        if missing:
            raise ValueError(f"{name}: lacks {', '.join(sorted(missing))}")
        if not name.startswith("LLAMA_PHASE_") or row["scope"] not in ("engine", "python") or row["kind"] not in KINDS:
            raise ValueError(f"{name}: bad name, scope or kind")
        if row["kind"] == "choice" and row["default"] not in row["choices"]:
            raise ValueError(f"{name}: default {row['default']!r} is not a choice")
    if len({row["name"] for row in rows}) != len(rows):
        raise ValueError("a variable is listed twice")
    return rows


def accepted(row: dict) -> str:
    """What a value may be, in the words of the engine's error message and of docs/env.md."""
    if row["kind"] == "choice":
        return ", ".join(row["choices"])
    if row["kind"] in ("int", "int_or_auto"):
        return ("auto or " if row["kind"] == "int_or_auto" else "") + f"{row['min']} to {row['max']}"
    if row["kind"] == "int_list":
        return f"{row['min']} to {row['max']}, or several separated by commas"
    return ABOUT[row["kind"]]


def render_inc(rows: list[dict]) -> str:
    lines = [
        "// Made from llama_phase/env.toml by tools/gen_env.py; do not edit.",
        "//",
        "// PHASE_ENV(name, kind, default, min, max, choices, accepted): a variable the engine reads",
        "// PHASE_ENV_OTHER(name): known, but not the engine's",
        "",
    ]
    for row in rows:
        if row["scope"] != "engine":
            lines.append(f"PHASE_ENV_OTHER({row['name']})")
            continue
        choices = "|".join(row.get("choices", []))
        text = json.dumps(accepted(row).replace("`", ""))
        lines.append(
            f"PHASE_ENV({row['name']}, {row['kind'].upper()}, {json.dumps(row['default'])}, "
            f"{row.get('min', 0)}, {row.get('max', 0)}, {json.dumps(choices)}, {text})"
        )
    return "\n".join(lines) + "\n"


def render_doc(rows: list[dict]) -> str:
    out = [
        "# Environment",
        "",
        "Made from `llama_phase/env.toml` by `make env-docs`; `make check` fails when the two differ.",
        "",
        "An empty value counts as unset. A `LLAMA_PHASE_*` name that is not listed here, or a value that is not "
        "accepted, is refused before anything is loaded, and the nearest known variable is named: exit code 2 from "
        "`llama-phase`, 78 from the engine when it is run by itself. "
        "With none of the engine's set, the engine is stock llama.cpp.",
    ]
    for scope, title in (("engine", "Read by the engine"), ("python", "Read by the `llama-phase` command")):
        chosen = [row for row in rows if row["scope"] == scope]
        if not chosen:
            continue
        out += ["", f"## {title}", "", "| variable | default | accepted | meaning |", "|---|---|---|---|"]
        for row in chosen:
            default = f"`{row['default']}`" if row["default"] else "none"
            out.append(f"| `{row['name']}` | {default} | {accepted(row)} | {row['meaning']} |")
    return "\n".join(out) + "\n"


def main(argv: list[str]) -> int:
    try:
        rows = load()
    except (ValueError, KeyError) as error:
        print(f"{REGISTRY.name}: {error}", file=sys.stderr)
        return 2
    stale = 0
    made = {ROOT / "engine" / "phase-env.inc": render_inc(rows), ROOT / "docs" / "env.md": render_doc(rows)}
    for path, text in made.items():
        if path.exists() and path.read_text() == text:
            continue
        if "--check" in argv:
            print(f"{path.relative_to(ROOT)} does not match {REGISTRY.name}: run `make env-docs`", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
