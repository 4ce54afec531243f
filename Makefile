# Everything runs from .venv, which `make setup` creates once and repeats only when the requirements change.
PYTHON ?= python3
BIN := .venv/bin
QUICK := not slow and not gpu and not soak
# A test that hangs shows every thread's stack after five minutes, ends its process after ten, and counts as failed. The
# stacks that pytest-timeout writes at its end do not leave a process of pytest-xdist. Such an end is the run's: with
# another process in its place, pytest-xdist may wait for ever.
# Actors of Ray and processes that a test waits for leave two cores idle: with two workers for half of the time, with
# three for 6 % of it, in three quarters of the time.
WORKERS ?= 3
TWO := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 600 --timeout-method thread -o faulthandler_timeout=300 --max-worker-restart 0
STAMP := .venv/.installed-$(shell cat requirements/cpu.txt requirements/dev.txt pyproject.toml | cksum | cut -d' ' -f1)

# Of the tests that last longest a sixth, which the commit draws. LONG= runs them all, as CI does.
LONG ?= --draw-long

WARM_START := $(BIN)/python -m examples.addition.warm_start # makes the quickstart's model, once

.PHONY: setup fit check test test-slow lint types imports soak bench docs clean

setup: $(STAMP)

# Last, Numba compiles the loops that make plans, a minute: otherwise the first steps of runs would wait for it.
# --no-deps: the list is complete, and torchvision's build of the registry demands a torch with CUDA.
$(STAMP):
	@echo "installing into .venv: some minutes, 4 GB of disk"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip uninstall -qq --yes ballast # the name of earlier versions
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m balancing.precompile
	rm -f .venv/.installed-*
	touch $@

fit: setup
	$(WARM_START)
	$(BIN)/python -m controller.fit --config examples/addition/config.yaml $(ARGS)

# The two checks of all code take a core each.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs=2 --output-sync types imports

# Strict on balancing, by the flags in pyproject.toml.
types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

# What a change needs, in under two minutes: tests of the modules that changed and of what imports them, one whole run.
# FILE=controller/step.py checks that file's.
check: setup
	$(BIN)/ruff check .
	$(BIN)/python -m tests.check $(FILE)

# Three files at a time, whole runs first.
test: lint
	$(BIN)/python -m pytest -m "$(QUICK)" $(TWO) $(LONG) --durations=10 $(ARGS)

# Properties are tried again on examples that are drawn anew.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu and not soak" $(LONG) --hypothesis-profile=drawn $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m "hypothesis and not slow and not gpu" --hypothesis-profile=drawn $(TWO) $(ARGS) || [ $$? = 5 ]

# Everything that can be killed is killed in turn; then 200 steps with kills at random moments of the first half, a run
# that generates ahead with more of them, and a shorter run with engines in processes of their own, as they are on GPUs.
soak: setup
	$(BIN)/python -m pytest -m soak $(ARGS)
	$(BIN)/python -m tests.benchmarks.soak --output docs/soak.md
	$(BIN)/python -m tests.benchmarks.soak --max-staleness 2 --steps 160 --kills 20 --until 60 --output docs/soak-asynchronous.md
	$(BIN)/python -m tests.benchmarks.soak --engine-processes --steps 40 --kills 4

# Minutes each, on a machine that has nothing else to do; most write their page. Not among them:
# tests.benchmarks.algorithms, which takes hours, and tests.gpu.benchmark, which needs a GPU.
bench: setup
	$(BIN)/python -m tests.benchmarks.balancing --output docs/balancing-benchmark.md
	$(BIN)/python -m tests.benchmarks.pipeline --output docs/pipeline-benchmark.md
	$(BIN)/python -m tests.benchmarks.engine --output docs/engine-benchmark.md
	$(BIN)/python -m tests.benchmarks.families --output docs/models.md
	$(BIN)/python -m tests.benchmarks.families --published --output docs/models.md
	$(BIN)/python -m tests.benchmarks.roofline --output docs/gpu-roofline.md
	$(WARM_START)
	$(BIN)/python -m tests.benchmarks.step --output docs/step-benchmark.md
	$(BIN)/python -m tests.benchmarks.prefixes --output docs/prefixes-benchmark.md
	$(BIN)/python -m tests.benchmarks.asynchronous --output docs/asynchronous-benchmark.md
	$(BIN)/python -m tests.benchmarks.gateway --output docs/gateway-benchmark.md
	$(BIN)/python -m tests.benchmarks.weights --output docs/weights-benchmark.md
	$(BIN)/python -m tests.benchmarks.lora_sync --output docs/lora-benchmark.md
	$(BIN)/python -m tests.benchmarks.schedule --output docs/schedule-benchmark.md --picture docs/schedule.png
	$(BIN)/python -m tests.benchmarks.sandboxes --output docs/sandboxes.md

docs: setup
	$(BIN)/python -m controller.config.settings_page > docs/settings.md
	$(BIN)/python -m controller.config.settings_page sft > docs/settings-sft.md
	$(BIN)/python -m controller.config.settings_page preferences > docs/settings-preferences.md
	$(BIN)/python -m controller.config.settings_page reward-model > docs/settings-reward-model.md
	$(BIN)/python -m controller.observability.metric_page > docs/metrics.md
	$(BIN)/python -m tests.workers.rollout.history_page > docs/templates.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf .venv site runs examples/*/cache
