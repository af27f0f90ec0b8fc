# Verbs only: the logic is in llama_phase/ and tools/. `make help` lists them.
# Needs Python >= 3.10 with venv, g++ >= 11, make and git. Recipes run in this folder, so `make -C` works from anywhere,
# and no target or prerequisite is an absolute path, so the path of the checkout may hold spaces.

SHELL  := /bin/bash
PYTHON ?= python3
# auto: CUDA, too, where nvcc and an NVIDIA GPU are; cpu; cuda
ENGINE ?= auto
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# of bench-gpu
SUITE  ?= gpu
JSON   ?= bench-$(SUITE).json

V := .venv/bin

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help prerequisites venv source prepare export check-patches status build bindings wheel stock models demo engine-tests test \
        check env-docs bundle bench bench-gpu named-model bump clean distclean

help: prerequisites  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | while IFS='|' read -r verb text; do \
	    printf '  make %-14s %s\n' "$$verb" "$$text"; done

prerequisites:  ## what is missing to build
	@$(PYTHON) tools/prerequisites.py

# The stamp is written last, so an interrupted installation is done again.
.venv/stamp: pyproject.toml
	@test -x $(V)/python || $(PYTHON) -m venv .venv
	@echo "installing the package and its build tools into .venv"
	@CMAKE_ARGS=-DLLAMA_BUILD=OFF $(V)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[build,synth,demo,test,llama-cpp-python]'
	@touch .venv/stamp

venv: prerequisites .venv/stamp  ## .venv with the package and its tools

source: venv  ## fetch and verify the pinned source: llama.cpp/
	@$(V)/python tools/fetch_source.py

prepare: source  ## pristine source + patches -> build/src
	@$(V)/python tools/patchq.py prepare

export: source  ## edits in build/src -> patches (INTO=name for a new one)
	@$(V)/python tools/patchq.py export --into '$(INTO)'

check-patches: source  ## rules, headers, budget and round trip of the patch queue
	@$(V)/python tools/patchq.py check

status: source  ## patches, and edits in build/src that are in none
	@$(V)/python tools/patchq.py status

build: source  ## compile the engine (ENGINE=cuda: with CUDA; CMAKE_ARGS are passed on)
	@$(V)/python -m llama_phase.build --backend $(ENGINE)

bindings: build  ## the Python bindings, on the engine that is built: llama_phase/_engine*.so
	@$(V)/python tools/bindings.py --backend $(ENGINE)

wheel: build  ## a wheel that carries bindings and engine: dist/
	@$(V)/python tools/bindings.py --wheel --backend $(ENGINE)

stock: source  ## compile the unpatched reference: build/stock/cpu
	@$(V)/python -m llama_phase.build --backend cpu --stock

models: source  ## make the models of the demo
	@$(V)/python -c 'from llama_phase.demo_plan import make_models; make_models()'

demo: build  ## serve a synthetic and a real model, stock against phase
	@$(V)/llama-phase demo

engine-tests: venv  ## unit tests of the C++ modules
	@if test -f engine/tests/Makefile; then $(MAKE) --no-print-directory -C engine/tests test; fi

# The tests are about the CPU engine; tools/gpu_check.sh tests a GPU engine.
test: export ENGINE := cpu
test: build stock bindings engine-tests  ## everything from scratch, then all tests
	@$(V)/python -m pytest $(PYTEST_FLAGS)

check: check-patches  ## lint, patch queue, generated files
	@$(V)/ruff check .
	@if test -f tools/gen_env.py; then $(V)/python tools/gen_env.py --check; fi

env-docs: venv  ## engine/phase-env.inc and docs/env.md from the registry of variables
	@$(V)/python tools/gen_env.py

bundle: prepare  ## one archive for a GPU machine without network
	@$(V)/python tools/bundle.py

bench: build  ## measure stock against phase (BENCH_ARGS)
	@$(V)/python -m llama_phase.bench $(BENCH_ARGS)

bench-gpu: export ENGINE := cuda
bench-gpu: named-model build  ## stock, static and phase on a GPU: table and JSON (MODEL=file, SUITE=gpu|gpu2|kv, JSON=file, BENCH_ARGS)
	@$(V)/python -m llama_phase.bench '$(MODEL)' --suite $(SUITE) --json '$(JSON)' $(BENCH_ARGS)

named-model:
	@test -n '$(MODEL)' || { echo 'error: no model is named'; echo 'fix: make $(MAKECMDGOALS) MODEL=path/to/model.gguf'; exit 2; } >&2

bump: source  ## try the queue on another release: REF=b11500
	@$(V)/python tools/patchq.py bump '$(REF)'

clean:  ## remove what was built; downloads and the compiler cache stay
	rm -rf build bundle engine/tests/build llama_phase/_engine.*.so

distclean: clean  ## remove .venv, llama.cpp/ and models, too
	rm -rf .venv llama.cpp models dist *.egg-info
