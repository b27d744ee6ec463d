# make demo        a GPT with planted faults under torchguard run, and its report; needs only Python, pip and make
# make test        lint, types, import layers and the short tests: a few minutes
# make test-long   the long tests: Inductor, more Hypothesis examples, the installed wheel, the docs
# make test TORCH=2.15.0 PYTHON=python3.13   all tests, short and long, on another torch or Python. The environment is
#                  one of its own; torch from the registry brings several GB of CUDA.
PYTHON ?= python3
VENV   := .venv$(if $(TORCH),-torch-$(TORCH)-$(notdir $(PYTHON)))
PINS   := $(VENV)/constraints.txt
BIN    := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c $(PINS)

# One thread: with two test processes, OpenMP threads that spin while they wait slow everything down a hundredfold.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-long lint types layers unit all-tests bench docs chromium clean

demo: $(VENV)/.demo
	@echo "demo: a small GPT with planted faults, unmodified, under torchguard run"
	@$(BIN)/torchguard run --watch --device edge-npu --dir build/demo --html build/demo.html examples/gpt.py

test: $(if $(TORCH),all-tests,lint types layers unit)

lint: $(VENV)/.dev
	@echo "lint: ruff"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	@echo "types: pyright"
	@$(BIN)/pyright

layers: $(VENV)/.dev
	@echo "layers: import-linter"
	@$(BIN)/lint-imports

unit: $(VENV)/.dev
	@echo "unit: pytest"
	@$(PYTEST) -m "not long"

all-tests: $(VENV)/.dev $(VENV)/.loggers chromium
	@echo "all tests: pytest"
	@$(PYTEST)

test-long: $(VENV)/.dev $(VENV)/.loggers docs chromium
	@echo "long: pytest"
	@$(PYTEST) -m "long or hypothesis" --hypothesis-profile=thorough
	@echo "long: pytest, shapes in signatures checked"
	@TORCHGUARD_CHECK_SHAPES=1 $(PYTEST) -m "not compiled and not wrong_types" tests/channel tests/test_checks.py tests/test_control.py \
		tests/distributed/test_flags.py tests/distributed/test_losses.py tests/distributed/test_collectives.py tests/training tests/testing

bench: $(VENV)/.dev
	@echo "bench: error channel against the published torchguard 1.1.0"
	@$(BIN)/python benchmarks/run.py
	@echo "bench: tensorcheck against jaxtyped"
	@$(BIN)/python benchmarks/typed.py
	@echo "bench: watched models against unwatched ones"
	@$(BIN)/python benchmarks/watched.py cpu
	@echo "bench: tracing watched models against unwatched ones"
	@$(BIN)/python benchmarks/tracing.py
	@echo "bench: guarded training steps against plain ones"
	@$(BIN)/python benchmarks/retry.py cpu
	@echo "bench: digests and gathers over ranks"
	@$(BIN)/python benchmarks/ranks.py
	@echo "bench: all guards, filtered and audited"
	@$(BIN)/python benchmarks/guarded.py
	@echo "bench: compiling with and without capturing artifacts"
	@$(BIN)/python benchmarks/captured.py
	@echo "bench: compiling for a simulated device"
	@$(BIN)/python benchmarks/device.py
	@echo "bench: a report of 10,000 steps and 1,000 modules in a browser"
	@$(BIN)/python benchmarks/report_page.py
	@echo "bench: compiled functions against torch.compile and autograd"
	@$(BIN)/python benchmarks/compiled.py

docs: $(VENV)/.docs
	@echo "docs: mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would drop the warnings that --strict counts

# Reports are tested in a real browser: Debian's, or the one that is installed.
chromium:
	@command -v chromium >/dev/null || { echo "setup: chromium"; apt-get -qq update && apt-get -qq install -y chromium >/dev/null; }

clean:
	rm -rf $(VENV) site dist build

$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "setup: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(PINS)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --upgrade "pip>=25.1"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "setup: tools for testing"
	@$(PIP) --group dev
	@touch $@

$(VENV)/.loggers: $(VENV)/.demo
	@echo "setup: loggers for testing"
	@$(PIP) --group loggers
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "setup: tools for the docs"
	@$(PIP) --group docs
	@touch $@
