# Every target is one `python -m ...` line; without make, type that line.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
STAMP_REAL := .venv/.installed-real

.PHONY: help setup demo quick test lessons course pretend real portable oldest newest notebooks slides book exhaustive table1 soak
.PHONY: bench kernels gpu lint clean exercises check hint watch questions solution reset gradebook autograder

help:   ## show this list
	@sed -n -e 's/^#: //p' -e 's/^\([a-z0-9]*\):[^#]*## /  \1	/p' $(MAKEFILE_LIST) | expand -t 14

#: Learn

demo: setup  ## train with every ZeRO stage, figures in results/: python -m minizero.train --output results ; BREAK=forgot-divide shows a mistake
	$(PY) -m $(if $(BREAK),tests.exercises.demo $(BREAK),minizero.train) --output results $(ARGS)

table1: setup  ## mixed precision against FP32, seven networks, up to half an hour: python -m minizero.mixed_precision --output results/table1
	$(PY) -m minizero.mixed_precision --output results/table1 $(ARGS)

notebooks: setup  ## run every notebook and keep what it shows: python -m notebooks.tools.run
	$(PY) -m notebooks.tools.run $(ARGS)

slides: setup  ## slides from the notebooks, and a deck of 50 minutes, in results/slides: python -m notebooks.tools.publish slides
	$(PY) -m notebooks.tools.publish slides $(ARGS)

book: setup  ## the notebooks as pages to be read from disk, in results/book: python -m notebooks.tools.publish book
	$(PY) -m notebooks.tools.publish book $(ARGS)

#: The course

exercises: setup  ## the course: all exercises, and where you are; PLAN=no: stubs without a plan: python -m tests.exercises list
	@$(PY) -m tests.exercises list $(if $(filter no,$(PLAN)),--no-plan)

# A command has said in words that an exercise has not passed (1), or that the line was wrong (2). Then make says no more.
SAID := || test $$? -le 2

check: setup  ## check the exercise you are at, or one by number, E=05: python -m tests.exercises check 05
	@$(PY) -m tests.exercises check $(E) $(SAID)

hint: setup  ## one more hint for it: python -m tests.exercises hint 05
	@$(PY) -m tests.exercises hint $(E) $(SAID)

watch: setup  ## check exercises on every save: python -m tests.exercises watch
	@$(PY) -m tests.exercises watch

questions: setup  ## three questions on a run of your own answer, E=05: python -m tests.exercises questions 05
	@$(PY) -m tests.exercises questions $(E) $(SAID)

solution: setup  ## the package's own function; before you have passed with INSIST=1: python -m tests.exercises solution 05
	@$(PY) -m tests.exercises solution $(E) $(if $(INSIST),--insist) $(SAID)

reset: setup  ## begin an exercise anew, make reset E=05: python -m tests.exercises reset 05
	@$(PY) -m tests.exercises reset $(E) $(SAID)

gradebook: setup  ## for lecturers: check submissions, DIR=folder, of E="05 08" or all: python -m tests.exercises gradebook folder 05 08
	@$(PY) -m tests.exercises gradebook $(DIR) $(E)

autograder: setup  ## for lecturers: what Gradescope and GitHub Actions take, E="05 08" or all: python -m tests.exercises autograder 05 08
	@$(PY) -m tests.exercises autograder $(E) $(SAID)

#: Develop

setup: $(STAMP)  ## make .venv with everything: python -m pip install -c constraints.txt -e ".[dev]"

quick: setup  ## while you work, the tests that end within a minute and a half: python -m pytest -n 2
	$(PY) -m pytest -n 2 $(ARGS)

test: setup  ## once at the end, all tests but those that have a target below: python -m pytest -n 2 -m "not apart"
	$(PY) -m pytest -n 2 -m "not apart" $(ARGS)

lessons: setup  ## run every notebook, which asserts what it says; make slides and book; keep nothing: python -m pytest -n 2 -m "lessons and not soak"
	$(PY) -m pytest -n 2 -m "lessons and not soak" $(ARGS)

course: setup  ## the course: right answers pass, wrong ones are told why: python -m pytest -n 2 -m "course and not soak"
	$(PY) -m pytest -n 2 -m "course and not soak" $(ARGS)

pretend: setup  ## what is meant for a GPU, where there is none: python -m pytest -n 2 -m "pretend and not soak"
	$(PY) -m pytest -n 2 -m "pretend and not soak" $(ARGS)

real: $(STAMP_REAL)  ## train real models in every stage, and X-ray the larger networks, in minutes: python -m pytest tests/real tests/xray -n 2 -m real
	$(PY) -m pytest tests/real tests/xray -n 2 -m real $(ARGS)

portable: setup  ## on Linux, the quick tests as older and other processors sum, three runs: python -m tests.portable
	$(PY) -m tests.portable $(ARGS)

oldest:  ## the lowest versions that pyproject.toml names, in an environment of their own, minutes: python -m tests.oldest
	$(PYTHON) -m tests.oldest

newest:  ## the newest versions of all of them, in an environment of their own, minutes: python -m tests.newest
	$(PYTHON) -m tests.newest

exhaustive: setup  ## every 16-bit number there is, in minutes on 2 cores: python -m pytest -m exhaustive -n 2
	$(PY) -m pytest -m exhaustive -n 2 $(ARGS)

soak: setup  ## the tests that run long to catch what is rare: python -m pytest -m soak
	$(PY) -m pytest -m soak $(ARGS)

lint: setup  ## python -m ruff check . ; python -m ruff format --check . ; python -m mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:  ## remove caches and builds; .venv and results/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

#: Measure

bench: setup  ## the benchmarks: python -m tests.bench
	$(PY) -m tests.bench $(ARGS)

kernels: setup  ## compile the attention kernels for GPUs that are not here, and show what they take: python -m flash.compile
	$(PY) -m flash.compile $(ARGS)

gpu: $(if $(GPU_PYTHON),,setup)  ## on a machine with a GPU, tests and benchmarks into OUT=folder, PART=tests|flash|memory|train|xray|notebooks: python -m tests.bench.gpu
	$(or $(GPU_PYTHON),$(PY)) -m tests.bench.gpu $(if $(OUT),--output $(OUT)) $(if $(PART),--part $(PART)) $(ARGS)

# The stamp is newer than both files once an installation has succeeded.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minizero needs Python 3.11 or newer; " + sys.executable + " is " + sys.version.split()[0] + ". Try: make setup PYTHON=python3.12")'
	@echo "Installing into .venv: downloads about 0.5 GB with a CPU build of torch, about 3 GB on Linux from the default index (torch brings CUDA: 5.2 GB on disk). PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS are respected."
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(STAMP_REAL): $(STAMP)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,real]"
	@touch $@
