# Everything runs in .venv, which the first target that needs it creates; only the tests of the
# kernels and of the SGLang plugin have their own, because torch and its CUDA libraries take 5 GB.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
# Triton 3.6's interpreter takes arrays of one element for scalars, which NumPy 2.4 refuses.
KERNEL_NUMPY := numpy<2.4
SGLANG_TESTS := tests/sglang_plugin
SGLANG := sglang==0.5.17 torchvision==0.26.0
STRICT := granikv.core granikv.sim granikv.cost_models granikv.traces
SERVER := --model llama-3.1-8b --gpu h200-sxm

.PHONY: plan test kernels test-sglang lint types wheel clean

# A real trace, whose prompts share little, and an agent workload, where a HOT pool pays.
plan: $(VENV)/base.stamp
	$(BIN)/granikv plan traces/data/mooncake-conversation.jsonl.gz $(SERVER) --end 600 \
	  --replicas auto --router prefix_affinity --seeds 5 --out out/plan-mooncake
	$(BIN)/granikv plan traces/data/agents.yaml $(SERVER) --seeds 5 --out out/plan-agents

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

# Needs no GPU: Triton's interpreter runs the kernels, its compiler builds them for sm_80 and sm_90.
kernels: $(GPU_VENV)/dev.stamp
	$(GPU_BIN)/python -m pytest tests/kernels -m "not gpu"

# Needs no GPU: the plugin in the real SGLang package, and in a server of it on a CPU.
test-sglang: $(GPU_VENV)/sglang.stamp
	$(GPU_BIN)/python -m pytest $(SGLANG_TESTS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy $(addprefix -p ,$(STRICT))

wheel: $(VENV)/dev.stamp
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist out src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python $(GPU_BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "GraniKV needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/base.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/base.stamp

$(GPU_VENV)/dev.stamp: pyproject.toml | $(GPU_BIN)/python
	$(GPU_BIN)/pip install --quiet --disable-pip-version-check -e '.[gpu,dev]' '$(KERNEL_NUMPY)'
	touch $@

$(GPU_VENV)/sglang.stamp: $(SGLANG_TESTS)/requirements.txt $(GPU_VENV)/dev.stamp
	$(GPU_BIN)/pip install --quiet --disable-pip-version-check -r $(SGLANG_TESTS)/requirements.txt
	$(GPU_BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	touch $@
