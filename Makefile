# Everything works on a fresh machine: the targets make their own virtual environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Compiled Python is kept, whatever the environment says: tests start hundreds of processes that would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test wide aot lint types mutants fuzz soak pictures reference clean

run: $(READY)
	$(BIN)/graphrt run -p "Why is the sky blue?" -n 96 --temp 0

# passive: waiting threads of several test processes must not fight over the cores; worksteal: a worker that has compiled
# for minutes gives away what waits behind that
test: export OMP_WAIT_POLICY = passive
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not aot and not wide"

# Which of `wide` and `aot` run: 1/3 has of every three cases the second, nothing has all.
SHARE ?=

# The other cases of tests/support/wide.py: kernels over more shapes, types and models, in the interpreter and emulators.
wide: export OMP_WAIT_POLICY = passive
wide: export GRAPHRT_SHARE = $(SHARE)
wide: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m wide

# Every kernel and configuration for sm_80, sm_90, sm_100 and gfx942: spills, shared memory, NaN, barriers, declared accesses.
aot: export GRAPHRT_SHARE = $(SHARE)
aot: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m aot tests/backends/triton/test_triton_aot.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Bugs of tests/mutants/*.toml, one at a time: about 35 minutes on 2 quiet cores; it goes on where it was stopped.
# make mutants MUTANTS="--area ops --seconds 600"
mutants: export OMP_WAIT_POLICY = passive
mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

# All fuzzers of tests/fuzz/, 10 minutes each; it goes on with the seeds at which it ended. What is found: build/fuzz/.
# make fuzz FUZZ="gguf --count 100000 --seed 0"; FUZZ="--seconds 120 --today" is what .ci/run does
FUZZ ?= --go-on
fuzz: export OMP_WAIT_POLICY = passive
fuzz: export PYTHONPATH = tests
fuzz: $(READY)
	$(BIN)/python -m fuzz.run $(FUZZ)

# Thousands of requests to a server, good, bad and broken off, after which nothing may be left: about 15 minutes.
SOAK ?= --count 20000
soak: export OMP_WAIT_POLICY = passive
soak: export PYTHONPATH = tests
soak: $(READY)
	$(BIN)/python -m support.soak $(SOAK)

# The constraints file pins what these targets install; users of the package choose their own versions.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Those of README and docs/ (docs/img/make.py says what they need), and docs/cli.md from the parsers.
pictures: $(READY)
	$(BIN)/python docs/img/make.py

reference: $(READY)
	$(BIN)/python -m graphrt.tools.cli_reference docs/cli.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
