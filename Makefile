# Every target creates .venv itself and needs only Python 3.11 or newer: make quickstart | test | lint | bench | soak | install
PYTHON ?= python3
PLATFORM ?= cpu
VENV ?= .venv
EVIDENCE ?= .venv-evidence
RUN := $(VENV)/bin/python
REQUIREMENTS := requirements$(if $(filter cpu,$(PLATFORM)),,-$(PLATFORM)).txt

.DEFAULT_GOAL := help
.PHONY: help install quickstart test slow check harness beam lint lock cycles registers bench evidence mutants soak
.DELETE_ON_ERROR:

help:
	@echo "make install PLATFORM=cpu|tpu|cuda   create the environment in $(VENV); EXTRAS=rl adds the simulator, eval lm-eval, beam Apache Beam"
	@echo "make quickstart                      train, evaluate and export a small model on simulated devices"
	@echo "make check | test | lint             a minute's checks | run the tests | check style and types"
	@echo "make slow SHARE=3/80                 a share of the slow tests, by their names"
	@echo "make bench                           repeat measurements of changed code, and write BENCHMARKS.md"
	@echo "make evidence [ONLY='h100 1m']        remake the plans of docs/plans with pinned compilers, and print what changed;"
	@echo "                                     without ONLY, also fail if a kernel has become slower"
	@echo "make mutants [FILES=trainer/step.py]  insert faults into important files: do the tests fail?"
	@echo "make lock                            update the pinned versions that images and TPU workers install"
	@echo "make soak [PARTS='kernels rest']     run the longest tests, in parts that resume"

# A stamp file for each list of requirements: pip runs again only if the list has changed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {v} found: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements%stamp: requirements%txt requirements.txt | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

install: $(VENV)/.$(REQUIREMENTS:.txt=.stamp) $(EXTRAS:%=$(VENV)/.requirements-%.stamp)

quickstart: install
	$(RUN) -m scripts.quickstart

test: $(VENV)/.requirements-test.stamp
	$(RUN) -m pytest tests -n 2 --dist loadfile $(PYTEST_FLAGS)

# A share of the slow tests, such as SHARE=3/80; the shares together are all of them. Most are in one file, so tests of a file are
# spread over processes. Some compare bits, which only the compiler's default flags preserve.
slow: $(VENV)/.requirements-test.stamp
	XLA_FLAGS= $(RUN) -m pytest tests -n 2 --dist worksteal -m slow --share $(SHARE)

# Takes a minute: from each package, the tests that fail first.
CHECKED := tests/test_rooms.py tests/test_dependencies.py tests/data/test_packing.py tests/data/test_clean.py \
	tests/data/templates tests/model/attention/test_coords.py tests/model/attention/test_partial.py tests/model/test_rope.py \
	tests/trainer/config tests/trainer/test_options.py tests/trainer/test_saves.py tests/trainer/run/test_opening.py \
	tests/trainer/run/test_directory.py tests/planning/test_machines.py tests/eval/test_scoring.py \
	tests/scripts/test_mistyped_commands.py tests/docs/test_pages.py
# The slowest tests of these files, left to make test.
UNCHECKED := tests/trainer/config/test_load.py::test_every_recipe_loads_and_opens_with_its_command \
	tests/trainer/config/test_load.py::test_a_run_that_began_with_another_default_template \
	tests/trainer/config/test_numbers.py::test_any_number_in_any_field tests/trainer/config/test_golden.py \
	tests/data/templates/test_random.py tests/data/templates/test_published.py tests/model/test_rope.py::test_embedding_matches_transformers \
	tests/test_dependencies.py::test_every_import_is_declared
check: $(VENV)/.requirements-test.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest $(CHECKED) $(addprefix --deselect ,$(UNCHECKED)) -n 2 --dist loadfile

lint: $(VENV)/.requirements-test.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_dependencies.py

# The tests of eval.harness, which needs lm-eval.
harness: $(VENV)/.requirements-eval.stamp $(VENV)/.requirements-test.stamp
	$(RUN) -m pytest tests/eval/test_harness.py --skips /dev/null
	$(RUN) -m pytest tests/test_outputs.py -k eval.harness --skips /dev/null

# The tests of data.beam. Not in the tests' environment: apache-beam needs an older protobuf than sentencepiece.
beam: $(VENV)-beam/bin/python
	$(VENV)-beam/bin/python -m pytest tests/data/test_beam.py --skips /dev/null

$(VENV)-beam/bin/python: requirements-beam.txt requirements.txt
	$(PYTHON) -m venv $(VENV)-beam
	$(VENV)-beam/bin/python -m pip install --quiet --disable-pip-version-check -r $< pytest pytest-xdist hypothesis
	@touch $@

# The same versions on every worker, even one recreated weeks later. uv is not among our requirements.
lock:
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	for platform in tpu cuda; do .cache/lock/bin/uv pip compile --quiet --upgrade --no-header --no-annotate --no-emit-index-url \
		--no-emit-find-links --python-version 3.12 --python-platform x86_64-manylinux_2_31 requirements-$$platform.txt \
		--output-file requirements-$$platform.lock || exit; done

# Needs no TPU: the compiler reports the cycles of a tile.
cycles: $(VENV)/.requirements-test.stamp
	$(RUN) -m scripts.benchmarks.kernel_cycles --check

bench: $(VENV)/.requirements-test.stamp
	$(RUN) -m scripts.benchmarks

# A separate environment with pinned versions.
$(EVIDENCE)/.stamp: requirements-evidence.txt requirements.txt
	$(PYTHON) -m venv $(EVIDENCE)
	$(EVIDENCE)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Needs no GPU: the compiler reports registers and spills.
registers: $(EVIDENCE)/.stamp
	$(EVIDENCE)/bin/python -m scripts.benchmarks.kernel_registers --check

evidence: $(EVIDENCE)/.stamp
	$(EVIDENCE)/bin/python -m scripts.benchmarks.evidence $(if $(ONLY),--only $(ONLY))
	$(if $(ONLY),,$(EVIDENCE)/bin/python -m scripts.benchmarks.kernel_cycles --check)
	$(if $(ONLY),,$(EVIDENCE)/bin/python -m scripts.benchmarks.kernel_registers --check)

# Takes hours: inserts one fault at a time and runs the tests of that file.
mutants: $(VENV)/.requirements-test.stamp
	$(RUN) -m tests.mutants $(if $(FILES),--files $(FILES))

soak: $(VENV)/.requirements-test.stamp
	$(RUN) -m tests.soak $(PARTS)
