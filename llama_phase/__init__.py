"""llama-phase: a phase-switching overlay on llama.cpp, and what builds, serves and measures it."""

__version__ = "0.1.0"
