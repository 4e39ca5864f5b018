# `make` alone lists the targets. The first one that needs it sets up .venv; nothing is installed
# outside the checkout, but for system packages where apt-get may be used (tools/check_system.sh).

PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CXX_FILES = $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*/*.h csrc/*/*/*.cpp)
STAGES := lint test-native test-asan test-tsan test-python test-gpu
# What streaming promises, on a GPU: tests that also run with their models made there.
GPU_TESTS := $(addprefix tests/test_,parity_patterns.py block_shapes.py block_weights.py \
	changes.py interruptions.py disable.py)

.DEFAULT_GOAL := help
.PHONY: help setup native simulator demo test $(STAGES) googletest mutate bench gpu-check \
	format tidy clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=$(PYTHON) makes the .venv; TORCH=$(TORCH) is what pip installs as torch."

setup: $(READY) ## make .venv with everything in it (the other targets do it when it is needed)

# First torch as pip gives it, so that no other package's wishes choose its build.
$(READY): pyproject.toml setup.py tools/demo-packages.txt
	@sh tools/check_system.sh build "$(PYTHON)"
	@test -x $(BIN)/python || { echo "setup: $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: $(TORCH) (the first time a large download)"
	@$(PIP) install $(TORCH)
	@echo "setup: the other packages"
	@$(BIN)/python tools/requirements.py build train dev simulator > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@$(PIP) install --no-deps -r tools/demo-packages.txt
	@echo "setup: trae_mem (compiles the native part)"
	@$(PIP) install --no-build-isolation --editable .
	@touch $@

native: $(READY) ## compile the extension module, if a source has changed
	@$(BIN)/python tools/native_build.py extension

simulator: $(READY) ## compile the simulated GPU (python -m trae_mem.sim and the tests do it too)
	@$(BIN)/python tools/simgpu_build.py
	@$(BIN)/python tools/torch_build.py

demo: export HF_HUB_OFFLINE = 1
demo: native ## fine-tune a small language model, streaming beside all resident
	@$(BIN)/trae-mem train examples/quickstart.yaml

test: $(READY) ## everything below up to test-gpu, with a summary
	@$(BIN)/python tools/run_stages.py "$(MAKE)" $(STAGES)

lint: $(READY) ## ruff, mypy --strict, clang-format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

test-native: $(READY) googletest ## native tests
	@$(BIN)/python tools/native_tests.py release

test-asan: $(READY) googletest ## native tests under the address, leak and undefined-behaviour sanitizers
	@$(BIN)/python tools/native_tests.py asan

test-tsan: $(READY) googletest ## native tests under the thread sanitizer
	@$(BIN)/python tools/native_tests.py tsan

test-python: export HF_HUB_OFFLINE = 1
test-python: native ## Python tests; ARGS="-k name -x" goes to pytest
	@$(BIN)/python -m pytest --junitxml=build/test-results/python.xml $(ARGS)

test-gpu: export HF_HUB_OFFLINE = 1
test-gpu: export TRAE_MEM_TEST_DEVICE = cuda
test-gpu: export OMP_NUM_THREADS = 1
test-gpu: native ## streaming's tests again, on a simulated GPU whose copies and kernels are late
	@$(BIN)/python -m trae_mem.sim --gpu A10 --memory 1GiB --poison --delay-us 50 -m pytest \
	  --junitxml=build/test-results/gpu.xml $(or $(ARGS),$(GPU_TESTS))

googletest:
	@sh tools/check_system.sh tests "$(PYTHON)"

mutate: export HF_HUB_OFFLINE = 1
mutate: $(READY) googletest ## take out each wait and check in turn; a test must fail (docs/testing.md)
	@$(BIN)/python tools/mutate.py

# A missed bound does not keep the other benchmarks from running.
bench: export HF_HUB_OFFLINE = 1
bench: native ## run the benchmarks; results and figures to docs/
	@mkdir -p docs/results; failed=; \
	for name in overlap footprint hooks peers headline; do \
	  $(BIN)/trae-mem bench $$name --json docs/results/$$name.json \
	    --figure docs/figures/$$name.png || failed="$$failed $$name"; \
	done; \
	$(BIN)/trae-mem bench overlap --device cuda --sim A10 --json docs/results/overlap_cuda.json \
	  --figure docs/figures/overlap_cuda.png || failed="$$failed overlap_cuda"; \
	test -z "$$failed" || { echo "bench: a bound was missed in:$$failed"; exit 1; }

gpu-check: ## on a machine with an NVIDIA GPU: build, conformance, parity, real sizes (8 minutes)
	@$(PYTHON) tools/gpu_check.py

format: $(READY) ## put Python and C++ in the house's form
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CXX_FILES)

tidy: $(READY) googletest ## clang-tidy, where it is installed (slow; not a part of make test)
	@command -v clang-tidy > /dev/null || \
	  { echo "tidy: clang-tidy is not installed: apt-get install -y clang-tidy" >&2; exit 1; }
	@$(BIN)/python tools/native_build.py compile-commands
	@clang-tidy -p build/native --quiet $(filter %.cpp,$(CXX_FILES))

clean: ## remove what was built; .venv stays
	@rm -rf build dist *.egg-info trae_mem/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	@rm -rf $(VENV)
