"""Where the engine's libraries are, and the compiled module that binds them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

from llama_phase.errors import MissingPrerequisite

PACKAGE = Path(__file__).resolve().parent


def library_path() -> Path:
    """Folder of libllama.so: inside the package (wheel), else of the engine built in this checkout (CUDA before CPU).

    llama-cpp-python takes it as LLAMA_CPP_LIB_PATH, before it is imported. Raises MissingPrerequisite.
    """
    places = [PACKAGE / "lib", *(PACKAGE.parent / "build" / backend / "bin" for backend in ("cuda", "cpu"))]
    for place in places:
        if (place / "libllama.so").is_file():
            return place
    raise MissingPrerequisite("there is no libllama.so of llama-phase", fix="`make build`, or install the wheel")


def native() -> ModuleType:
    """The compiled module. Raises MissingPrerequisite when it is not there, or cannot use this process's libllama.

    The library is loaded by its path first: the module then uses that one, or one with the same name that another
    binding loaded before.
    """
    try:
        ctypes.CDLL(str(library_path() / "libllama.so"))
        from llama_phase import _engine
    except (ImportError, OSError) as error:
        if "undefined symbol" in str(error):  # of libllama or of the libggml-base that came with it
            raise MissingPrerequisite(
                f"another libllama without phases is loaded in this process: {error}",
                fix="set LLAMA_CPP_LIB_PATH to llama_phase.library_path() before llama_cpp is imported",
            ) from None
        raise MissingPrerequisite(
            f"the bindings of llama-phase cannot be loaded: {error}", fix="`make bindings`, or install the wheel"
        ) from None
    return _engine
