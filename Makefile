# Everything runs in a separate virtual environment; only Python 3.11 or newer, pip and make are needed.
# `make` alone lists the targets. A step installs only what it needs, and only when that changed.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Processes of `make test`: one per core and at most 8, each takes 1.5 GB; 0 runs all tests in one, where a debugger stops.
WORKERS ?= auto
MATRIX_ARGS ?=
# How many random orders `make interleavings` trains in, those of earlier runs included.
COUNT ?= 10000
# What `make bench-gpu` and `make gpu-dry-run` pass on, and where their results go.
GPU_ARGS ?=
GPU_OUT ?= build/gpu
# What `make compat` runs, and with which versions of transformers. Another Python: all tests of both packages, with ours.
ifeq ($(origin PYTHON),command line)
VERSIONS ?= $(shell sed -n 's/^transformers==//p' constraints.txt)
COMPAT_TESTS ?= tests/flatten tests/runtime -m "not extended"
endif
VERSIONS ?= 4.56.2 4.57.6 5.0.0 5.17.0 5.23.0
COMPAT_TESTS ?= tests/flatten --ignore=tests/flatten/cli/test_demo.py \
	$(patsubst %,tests/runtime/huggingface/%.py,cutting/test_capture loss/test_weights trainer/test_scripts \
	trainer/test_checkpoints test_wrap test_wrap_as_model) \
	tests/runtime/fine_tune/test_training.py

# A folder with further programs for `make newest`, newest_*.py and a run.py that runs them; left out where it is missing.
CASES ?= ../shared/cases
NEWEST_ARGS ?=
FUZZ_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What each step needs, in addition to the package itself: extras for what users run, groups for what developers run.
NEEDS_demo := --editable '.[transformers,onnx,cli]'
NEEDS_test := --editable '.[all]' --group test
NEEDS_tasks := '.[all]' --group test --group types
NEEDS_lint := --group lint
NEEDS_types := --editable . --group types
NEEDS_docs := --editable '.[all]' --group docs
NEEDS_executorch := --editable '.[all,executorch]' --group test
NEEDS_matrix := --editable '.[transformers,onnx,cli]'
NEEDS_notebooks := --editable '.[all]' --group notebooks
NEEDS_dev := --editable '.[all]' --group dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help tables ready demo test extended coverage coverage-others tasks accelerator accelerator-tests interleavings mutants executorch quantized compat newest kills fuzz ranks release-check house lint format types doctest docs site notebooks bench bench-gpu gpu-dry-run matrix operators cut-matrix trainings genai oracle real runtimes clients clients-installed browser clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.has-demo  ## export four small models, train one through a pipeline, and show the results
	@$(BIN)/python -m yobx_flatten demo
	@echo
	@$(BIN)/python -m roundpipe_runtime demo

# One installation instead of one per step: each takes some seconds, even if nothing is missing.
ready: $(VENV)/.has-dev  ## install what all steps need at once
	@touch $(addprefix $(VENV)/.has-,demo test lint types docs matrix notebooks)

test: $(VENV)/.has-test  ## run the tests, a process per core (PYTEST_ARGS="-k cache" and the like are passed on, WORKERS=0: one process)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not extended" $(PYTEST_ARGS)

extended: $(VENV)/.has-test  ## run the further cases of what `make test` checks: more models, runtimes, programs and repetitions
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m extended $(PYTEST_ARGS)

# Half an hour: each line that runs is noted. Without the tests that fork while other threads run: what coverage does in a
# child waits for locks of threads that the child has not. And without the one that interrupts every few milliseconds,
# which are less than a traced call takes.
NOT_COVERED := --ignore tests/flatten/registry/test_forks.py \
	--deselect tests/runtime/engine/test_interrupted.py::test_an_interrupted_call_did_all_or_nothing
coverage: $(VENV)/.has-test  ## run the tests, print by folder which lines and branches ran, and write docs/data/coverage.json
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --timeout 900 --cov --cov-report json:build/coverage.json \
		$(NOT_COVERED) $(PYTEST_ARGS)
	$(BIN)/python docs/coverage_table.py build/coverage.json

# What is written for them runs nowhere else.
coverage-others:  ## add to `make coverage` the tests of ExecuTorch and those with the oldest transformers, a quarter of an hour
	@$(MAKE) executorch PYTEST_ARGS="--timeout 900 --cov --cov-append --cov-report="
	@$(MAKE) compat VERSIONS=4.56.2 PYTEST_ARGS="-n $(WORKERS) --maxprocesses 8 --timeout 900 --cov --cov-append \
		--cov-report=json:build/coverage.json $(NOT_COVERED)"
	$(BIN)/python docs/coverage_table.py build/coverage.json

# The wheel is installed anew each time, and the programs run where the sources are not.
tasks: docs  ## do common tasks exactly as the built site describes them, in .venv-tasks, with the wheel
	@$(MAKE) VENV=.venv-tasks .venv-tasks/.has-tasks
	.venv-tasks/bin/python -m pip install --quiet --no-deps --force-reinstall .
	TASKS_SITE=$(CURDIR)/build/docs .venv-tasks/bin/python -m pytest -n 0 tests/tasks tests/test_user_types.py $(PYTEST_ARGS)

# docs/dev/accelerator.md states what it shows. One process: the order of the work would differ between several.
accelerator: $(VENV)/.has-test  ## run the tests of the pipeline on an accelerator simulated on the CPU (PYTEST_ARGS="--order random --seed 7")
	$(BIN)/python -m pytest -p tests.accelerator.plugin -n 0 tests/accelerator/on_late tests/gpu $(PYTEST_ARGS) \
		$(addprefix tests/runtime/,optim \
		$(addprefix pipeline/test_,calls.py wrapping.py))

accelerator-tests: $(VENV)/.has-test  ## run all tests of the runtime on that accelerator, in two orders on 1, 2 and 4 devices; continues where it stopped
	$(BIN)/python -m tests.accelerator.parts --page

interleavings: $(VENV)/.has-test  ## train on that accelerator in COUNT=10000 random orders of work and compare results bitwise; continues where it stopped
	$(BIN)/python -m tests.accelerator.interleavings $(COUNT)

mutants: $(VENV)/.has-test  ## remove each wait, event and pin from the device code once, and show which test fails
	$(BIN)/python -m tests.accelerator.mutants --page docs/dev/mutants.md

executorch:  ## run the tests of ExecuTorch, in .venv-executorch, because ExecuTorch installs torchao, which other tests do not expect
	@$(MAKE) VENV=.venv-executorch .venv-executorch/.has-executorch
	.venv-executorch/bin/python -m pytest -k executorch $(PYTEST_ARGS) tests/flatten/runners tests/flatten/verify \
		tests/flatten/export/test_runtimes.py tests/flatten/export/test_executorch.py \
		tests/flatten/model_folder/test_targets.py tests/flatten/generate/test_by_transformers.py

# Next to the libraries of the tests and not among them: transformers imports torchao where it finds it.
QUANTIZED := build/quantized
quantized: $(VENV)/.has-test  ## run the tests of quantized weights with bitsandbytes and torchao, in build/quantized
	@test -d $(QUANTIZED)/bitsandbytes || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(QUANTIZED) $$(grep -iE '^(bitsandbytes|torchao)==' constraints.txt)
	PYTHONPATH=$(CURDIR)/$(QUANTIZED) $(BIN)/python -m pytest -n 0 tests/runtime/quantized tests/flatten/export/test_converted.py $(PYTEST_ARGS)

compat:  ## run the tests of caches and of the Trainer also with older transformers (VERSIONS="4.56.2 5.23.0" for some of them), or all with another Python (PYTHON=python3.13)
	@PYTHON="$(PYTHON)" .ci/compat "$(VERSIONS)" $(COMPAT_TESTS) $(PYTEST_ARGS)

# What a user gets who installs today: without constraints.txt, and each time anew. torch for CUDA is 7 GB on Linux.
NEWEST := .venv-newest/bin/python
newest:  ## run the main programs with the newest versions that pip installs, in .venv-newest, and record the results
	@test -x $(NEWEST) || $(PYTHON) -m venv .venv-newest
	$(NEWEST) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(NEWEST) -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		'.[transformers,onnx,cli,train]' --group newest
	$(NEWEST) -m matrix.newest --cases "$(CASES)" $(NEWEST_ARGS)

# Python alone is needed: the tools and the wheel are installed into environments that are removed afterwards.
RELEASE_ARGS ?=
release-check:  ## build wheel and sdist, check their contents, and run the README from the wheel with three Pythons (RELEASE_ARGS="--pythons 3.11")
	$(PYTHON) tests/release_check.py $(RELEASE_ARGS)

lint: $(VENV)/.has-lint  ## check style, formatting, spelling, and which folder imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

house:  ## print how many lines and files the packages have, by folder, next to what pyproject.toml allows
	@$(PYTHON) tests/house.py

kills: $(VENV)/.has-test  ## kill a training and each program that writes files 30 times: the training resumes bitwise identical, and files are old or new
	ROUNDPIPE_KILLS=30 $(BIN)/python -m pytest tests/killed tests/runtime/checkpoint/test_killed.py \
		tests/runtime/huggingface/trainer/test_checkpoints.py::test_kills_change_no_bit $(PYTEST_ARGS)

# The seeds of a run follow those of the last one; a finding is noted in tests/fuzz/found.json, and then tested always.
fuzz: $(VENV)/.has-test  ## fuzz the readers of files: 1000 changed files of each kind, more for stored values (FUZZ_ARGS="nested --count 5000")
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

ranks: $(VENV)/.has-test  ## train 50 steps in 2 and 3 processes and compare bitwise with one process
	ROUNDPIPE_RANKS_STEPS=50 $(BIN)/python -m pytest -n 0 tests/runtime/distributed/test_ranks.py $(PYTEST_ARGS)

format: $(VENV)/.has-lint  ## repair what lint can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.has-types  ## check the types of both packages
	$(BIN)/mypy

# The plugin brings the check that a test leaves the registries as it found them: an example is held to it too.
doctest: $(VENV)/.has-test  ## run the examples of the docstrings
	$(BIN)/python -m pytest -p tests.conftest --doctest-modules yobx_flatten roundpipe_runtime

docs: $(VENV)/.has-docs  ## build the site into build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going --quiet -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

tables: $(VENV)/.has-docs  ## write the tables and pictures of docs/tables from the recorded data and the helps of the commands
	$(BIN)/python docs/generated_tables.py

site: docs $(VENV)/.has-test  ## build the site, and open each page in a browser (chromium) in phone and desktop size
	$(BIN)/python -m pytest -n 0 tests/site

# The executed copies go to build/notebooks, so the tree stays as it is.
notebooks: $(VENV)/.has-notebooks  ## run every notebook; fail if a cell fails
	@set -e; for notebook in notebooks/*.ipynb; do \
		test -e "$$notebook" || { echo "notebooks/ holds no notebook"; break; }; \
		$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute \
			--ExecutePreprocessor.kernel_name=python3 --ExecutePreprocessor.timeout=600 \
			--output-dir build/notebooks "$$notebook"; \
		echo "$$notebook ran"; \
	done

bench: $(VENV)/.has-test  ## run the benchmarks, one table each
	@set -e; for benchmark in benchmarks/bench_*.py; do \
		test -e "$$benchmark" || { echo "benchmarks/ holds no benchmark"; break; }; \
		echo "== $$benchmark"; $(BIN)/python "$$benchmark"; \
	done

bench-gpu: $(VENV)/.has-test  ## measure a GPU, run the tests for devices, compare trainings with other programs; continues where it stopped (GPU_ARGS="tests 1.7B")
	$(BIN)/python benchmarks/gpu_day.py --out $(GPU_OUT) $(GPU_ARGS)
	$(BIN)/python benchmarks/gpu_day.py --page --out $(GPU_OUT)

# As on a machine without a network: Python 3.12 with these versions and no more, and what is missing comes as wheels.
GPU_PYTHON ?= .venv-gpu/bin/python
GPU_VERSIONS := torch==2.11.0 transformers==5.17.0 accelerate peft safetensors onnxruntime onnx onnxscript pytest rich \
	typer psutil filelock packaging
gpu-dry-run:  ## do all of make bench-gpu with tiny models and no GPU, in .venv-gpu: Python 3.12, torch 2.11, no msgspec (7 GB)
	@test -x $(GPU_PYTHON) || { python3.12 -m venv .venv-gpu && \
		$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check $(GPU_VERSIONS); }
	$(GPU_PYTHON) benchmarks/gpu_day.py --wheels build/wheels
	OMP_NUM_THREADS=1 $(GPU_PYTHON) benchmarks/gpu_day.py --shapes tiny --device cpu --wheels build/wheels --out $(GPU_OUT) \
		$(GPU_ARGS)

# Hours for all types; what is recorded is not run again. MATRIX_ARGS="--sample 8 --columns built,export" does less.
matrix: $(VENV)/.has-matrix  ## check every step of an export for every model type of the installed transformers (MATRIX_ARGS="--sample 8")
	$(BIN)/python -m matrix $(MATRIX_ARGS)
	$(BIN)/python -m matrix --page docs/matrix.md

operators: $(VENV)/.has-matrix  ## export operators and call their files with other values than the example's (MATRIX_ARGS="--only atan2")
	$(BIN)/python -m matrix.operators $(MATRIX_ARGS)
	$(BIN)/python -m matrix.operators --page docs/operators.md

cut-matrix: $(VENV)/.has-matrix  ## split and train every causal language model of the installed transformers (MATRIX_ARGS="--sample 25")
	$(BIN)/python -m matrix.cut $(MATRIX_ARGS)
	$(BIN)/python -m matrix.cut --page docs/cut_matrix.md

# An hour for all rows; what is recorded is not run again.
trainings: $(VENV)/.has-test  ## train transformers heads, losses, adapters and options, and compare with the reference model (MATRIX_ARGS="--sample 42")
	$(BIN)/python -m matrix.trainings $(MATRIX_ARGS)
	$(BIN)/python -m matrix.trainings --page docs/trainings.md

genai: $(VENV)/.has-test  ## export decoders and open them with onnxruntime-genai (MATRIX_ARGS="--sample 5")
	$(BIN)/python -m matrix.genai $(MATRIX_ARGS)
	$(BIN)/python -m matrix.genai --page docs/genai.md

# They ask for an older transformers than ours; of the rest, torch alone must be the one that is there.
CLIENTS := .venv-clients/bin/python
clients-installed: $(VENV)/.has-test
	@test -x $(CLIENTS) || $(PYTHON) -m venv .venv-clients
	$(CLIENTS) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(CLIENTS) -m pip install --quiet --disable-pip-version-check "$$(grep -i '^torch==' constraints.txt)" --group clients

clients: clients-installed  ## open exported folders with optimum and sentence-transformers, in .venv-clients
	CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS) $(BIN)/python -m pytest tests/flatten/model_folder/test_clients.py $(PYTEST_ARGS)

# optimum runs there; mobius is next to our libraries and not among them.
oracle: clients-installed  ## export models with our exporter and with others, and verify all files; continues where it stopped
	@test -d build/oracle/mobius || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target build/oracle mobius-onnx==0.1.0 onnx-shape-inference==0.4.0
	ORACLE_PYTHON=$(CURDIR)/$(CLIENTS) ORACLE_LIBRARIES=$(CURDIR)/build/oracle $(BIN)/python -m matrix.oracle $(MATRIX_ARGS)
	$(BIN)/python -m matrix.oracle --page docs/oracle.md

browser: $(VENV)/.has-test  ## open exported folders in Chromium (needs npm, chromium and chromedriver; BROWSER_MODEL=FOLDER: also a real one)
	$(BIN)/python -m pip install --quiet --group browser
	npm install --prefix examples/browser --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pytest tests/flatten/model_folder/test_browser.py $(PYTEST_ARGS)

# espeak-ng speaks the sentence that is transcribed (apt install espeak-ng).
# ExecuTorch's row is measured with .venv-executorch/bin/python -m matrix.real, after make executorch.
real: $(VENV)/.has-test  ## export a model with trained weights in every form, ask it questions, and fine-tune it (MATRIX_ARGS='--only float32' TUNE_ARGS='--only chat')
	$(BIN)/python -m matrix.real_model
	$(BIN)/python -m matrix.real $(MATRIX_ARGS)
	$(BIN)/python -m matrix.real_speed
	$(BIN)/python -m matrix.real_loops
	if test -d .venv-executorch; then $(BIN)/python -m matrix.real_runtimes; fi
	if command -v npm >/dev/null; then $(BIN)/python -m matrix.real_llama_cpp; fi
	$(BIN)/python -m matrix.real_sound
	$(BIN)/python -m matrix.real_embeddings
	$(BIN)/python -m matrix.real_training --jobs 1 $(TUNE_ARGS)
	$(BIN)/python -m matrix.real --page docs/real.md

# All columns are there where ExecuTorch is: make executorch, then .venv-executorch/bin/python -m matrix.runtimes
runtimes: $(VENV)/.has-test  ## export models for every runtime and check them there (MATRIX_ARGS="--only llama")
	$(BIN)/python -m matrix.runtimes $(MATRIX_ARGS)
	$(BIN)/python -m matrix.runtimes --page docs/runtimes.md

clean:  ## remove what the targets built, but not the virtual environment
	rm -rf build dist docs/auto_examples docs/sg_execution_times.rst .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find yobx_flatten roundpipe_runtime matrix tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the virtual environments too
	rm -rf $(VENV) .venv-compat-* .venv-executorch .venv-tasks .venv-newest .venv-clients .venv-gpu

# `--group` needs a newer pip than Python brings; its version comes from constraints.txt too.
$(VENV)/.has-pip: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	@touch $@

$(VENV)/.has-%: $(VENV)/.has-pip
	@echo "installing what 'make $*' needs into $(VENV) (minutes the first time)"
	$(PIP_INSTALL) $(NEEDS_$*)
	@touch $@
