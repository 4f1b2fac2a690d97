# make demo: the whole chain on a real engine. make test: all tests. Both make what they need under .work/ first.
WORK := $(or $(NVSNAP_WORK),$(CURDIR)/.work)
PYTHON := $(WORK)/venv/bin/python
SOURCES := nvsnap_launch hooks bench demo images matrix tests tools
# pytest ends with 5 when it found no test: that is a failure too, but one that should be named.
NO_TEST := { code=$$?; [ $$code != 5 ] || echo 'no test was found: is the selection right?' >&2; exit $$code; }

.PHONY: help setup venv image bench turns demo soak matrix test test-fast check
help:
	@echo 'make demo       dump and restore a real vLLM under load, with a table at the end (DEMO="--tp 1" for options)'
	@echo 'make matrix     how far each version of vLLM gets, into the README (MATRIX="0.27.1 0.32.0" for some, MATRIX="--engine sglang")'
	@echo 'make bench      bare vLLM against vLLM under the launcher: speed, start-up, memory (BENCH="--pairs 5 --tp 1")'
	@echo 'make turns      bare and launched side by side, asked in turns: speed on a noisy machine (TURNS="--turns 40")'
	@echo 'make soak       prepare and restore in place 50 times under load (SOAK="--cycles 50 --compiled")'
	@echo 'make test       all tests, with the real engines and CRIU'
	@echo 'make test-fast  unit and contract tests'
	@echo 'make check      ruff and mypy'
	@echo 'make setup      only make what these need, under $(WORK)'
	@echo 'make image      the Debian image of the CPU chain, as root (IMAGE=--with-engine: the engine in it, 3 GB more)'

setup:
	@tools/setup

venv:
	@tools/setup venv

image: setup
	@$(PYTHON) images/debian-cpu/build.py --work '$(WORK)' $(IMAGE)

demo: setup
	@$(PYTHON) -m demo.run --work '$(WORK)' $(DEMO)

matrix: setup
	@$(PYTHON) -m matrix.run --work '$(WORK)' $(MATRIX)

bench: setup
	@$(PYTHON) -m bench.run --work '$(WORK)' $(BENCH)

turns: setup
	@$(PYTHON) -m bench.turns --work '$(WORK)' $(TURNS)

soak: setup
	@$(PYTHON) -m bench.soak --work '$(WORK)' $(SOAK)

# First what needs no engine: its processes wait more than they run. Then what has the machine for itself.
test: test-fast setup
	@tools/setup oldest sglang sglang-oldest
	@NVSNAP_WORK='$(WORK)' $(PYTHON) -m pytest -n 4 -m 'faults or whole' $(PYTEST) || $(NO_TEST)
	@[ "$$(id -u)" != 0 ] || $(MAKE) --no-print-directory image
	@NVSNAP_WORK='$(WORK)' NVSNAP_CRIU='$(or $(NVSNAP_CRIU),$(WORK)/criu/criu)' $(PYTHON) -m pytest -m '(engine or criu or gpu or image) and not slow' $(PYTEST) || $(NO_TEST)

test-fast: venv
	@NVSNAP_WORK='$(WORK)' $(PYTHON) -m pytest -n 6 --dist worksteal -m 'not engine and not criu and not gpu and not faults and not whole and not image' $(PYTEST) || $(NO_TEST)

check: venv
	@$(PYTHON) -m ruff check $(SOURCES)
	@$(PYTHON) -m ruff format --check $(SOURCES)
	@$(PYTHON) -m mypy
	@$(PYTHON) -m mypy -p bench -p demo -p matrix
	@$(PYTHON) -m mypy images/debian-cpu/build.py
	@MYPYPATH=tools/sglang-cpu $(PYTHON) -m mypy -p sgl_kernel -p torchvision
