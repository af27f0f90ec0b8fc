"""Settings from a file: `llama-phase.toml` of the project folder, then of the user's configuration folder.

A file holds the names of `Settings` as flat keys, and `upstream`, the flags for llama-server. A key of the project's
file hides the same key of the user's. Values are read as the text of a variable would be, so that both accept the
same; an empty one is unset. A path in a file is relative to the folder of that file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llama_phase.env import PREFIX, nearest, registry
from llama_phase.errors import UsageError
from llama_phase.upstream_flags import split_upstream

FILE_NAME = "llama-phase.toml"
CONFIG_VARIABLE = PREFIX + "CONFIG"
NO_FILE = "off"
READ_NONE = f"{CONFIG_VARIABLE}={NO_FILE}"
PATHS = ("model", "server_binary", "state_dir")


class Value(NamedTuple):
    """Text (or the words of `upstream`) of one key, and where it stands."""

    value: Any
    source: str


def config_files(
    base: Mapping[str, str] | None = None, *, project: Path | None = None, user: Path | None = None
) -> list[Path]:
    """The files to read, strongest first: LLAMA_PHASE_CONFIG alone (`off`: none), else those that exist of the two.

    Raises UsageError when the variable names a file that is not there.
    """
    named = (os.environ if base is None else base).get(CONFIG_VARIABLE, "")
    if named == NO_FILE:
        return []
    if named:
        path = expanded(Path(named), CONFIG_VARIABLE)
        if not _is_file(path):
            raise UsageError(f"{CONFIG_VARIABLE} names no file: {path}", fix="correct it, unset it, or say `off`")
        return [path.absolute()]
    if user is None:
        from platformdirs import user_config_path

        user = user_config_path("llama-phase", appauthor=False)
    if project is None:
        with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
            project = Path.cwd()
    folders = [folder for folder in (project, user) if folder is not None]
    return [path for path in dict.fromkeys(folder / FILE_NAME for folder in folders) if _is_file(path)]


def expanded(path: Path, named: str) -> Path:
    """`path` with the home folder in place of `~`. Raises UsageError, which says where it is `named`."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"{named}: there is no home folder {path.parts[0]}", fix="give the whole path, from / on"
        ) from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix=f"allow it, or set {READ_NONE}") from None


def read_files(paths: Iterable[Path], fields: Iterable[str]) -> dict[str, Value]:
    """Values by the name of the setting (of `fields`, or an engine variable without one), strongest file first.

    Raises UsageError for a file that cannot be read, an unknown key (with the nearest name), a value of the wrong
    kind, a setting given twice in one file, and an API key that others may read.
    """
    found: dict[str, Value] = {}
    known = {*fields, *(v.field for v in registry().values() if v.scope == "engine")}
    for path in paths:
        try:
            values = _read(path, known)
        except UsageError as error:
            if READ_NONE in error.fix:
                raise
            # `down` and `status` must remain possible
            raise UsageError(str(error), fix=f"{error.fix}; to read no file: {READ_NONE}") from None
        for name, value in values.items():
            found.setdefault(name, value)
    return found


def _read(path: Path, known: set[str]) -> dict[str, Value]:
    source = f"file {path}"
    values: dict[str, Value] = {}
    flags: tuple[str, ...] = ()
    for name, raw in _parse(path).items():
        if name not in known:
            near = nearest(name, known)
            what = "table" if isinstance(raw, dict) else "setting"
            raise UsageError(f"{path}: there is no {what} `{name}`", fix=f"the nearest setting is `{near}`")
        if name == "upstream":
            flags = _words(path, raw)
            continue
        text = _text(path, name, raw)
        if not text:
            continue
        variable = registry().get(PREFIX + name.upper())
        if variable is not None:
            variable.check(text, shown=f"{path}: `{name}`")
        if variable is not None and variable.secret:
            _refuse_if_shared(path, name)
        values[name] = Value(path.parent / expanded(Path(text), f"{path}: `{name}`") if name in PATHS else text, source)
    theirs, rest = split_upstream(flags)
    for name, (flag, text) in theirs.items():
        if name in values and str(values[name].value) != text:
            raise UsageError(
                f"{path} gives {name} twice: `{name}` and `{flag} {text}` in `upstream`", fix="keep one of them"
            )
        values[name] = Value(text, f"{source} ({flag})")
    if rest:
        values["upstream"] = Value(rest, source)
    return values


def _parse(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read {path}: {reason}", fix=f"allow it, or set {READ_NONE}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not TOML: {error}", fix='lines look like `port = 8080` and `log = "info"`'
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(
            f"{path} holds a number too long, or lists too deep, to be read", fix="write numbers and texts as they are"
        ) from None


def _text(path: Path, name: str, raw: Any) -> str:
    """A TOML value as the text that a variable would hold."""
    if isinstance(raw, bool):
        return "on" if raw else "off"
    if isinstance(raw, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in raw):
        return ",".join(_text(path, name, item) for item in raw)
    if isinstance(raw, (str, int, float)):
        with contextlib.suppress(ValueError):  # of thousands of digits
            return str(raw)
    raise UsageError(f"{path}: `{name}` is no text, number, or list of numbers", fix=f"write `{name} = VALUE`")


def _words(path: Path, raw: Any) -> tuple[str, ...]:
    if isinstance(raw, list) and all(
        isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in raw
    ):
        return tuple(str(item) for item in raw)
    raise UsageError(f"{path}: `upstream` is no list of words", fix='write `upstream = ["-ngl", "99", "--cpu-moe"]`')


def _refuse_if_shared(path: Path, name: str) -> None:
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{path} holds `{name}` and others may read it", fix=f"chmod 600 {path}")
