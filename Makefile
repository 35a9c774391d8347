# On a machine with only Python 3.11 and pip, everything else goes into .venv:   make demo    make test
# Where a Python already has torch and transformers, use that one as it is:      make test VENV= PYTHON=python3
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY := registered
else
RUN := $(abspath $(VENV))/bin/python
READY := $(VENV)/.installed
endif

# Most modules of these packages are never imported; Python compiles the others when they are.
INSTALL = $(RUN) -m pip install --no-compile

# pytest-xdist is a convenience that a bare machine may lack.
PARALLEL = $(shell $(RUN) -c "import xdist" 2>/dev/null && printf '%s' "-n $(WORKERS) --dist worksteal")

.PHONY: install demo test models decisions lint types build clean registered

install: $(READY)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@# CUDA builds of torch bring the Triton they were built with; CPU builds bring none.
	test "$$(uname)" != Linux || $(RUN) -c "import triton" 2>/dev/null || $(INSTALL) triton==3.9.0
	$(INSTALL) --no-build-isolation -e '.[hf,inspect,dev]' -c constraints.txt
	touch $@

# torch.compile finds backend="fp4moe" through the metadata of an installed distribution, hence no bare PYTHONPATH.
registered:
	@cd / && $(RUN) -c "import fp4_inductor as f; assert f.__file__.startswith('$(CURDIR)/')" 2>/dev/null \
		|| (cd "$(CURDIR)" && $(RUN) -m pip install --no-deps --no-build-isolation -e .)

demo: $(READY)
	$(RUN) examples/quickstart.py $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(PARALLEL) $(ARGS)

# What is recognised of every model family, as MODELS.md tells it. ARGS may name some families.
models: $(READY)
	PYTHONPATH=tests $(RUN) tests/families/family_table.py --write --workers $(WORKERS) $(ARGS)

# Which backend runs the blocks of well-known models on each device, as DECISIONS.md tells it.
decisions: $(READY)
	PYTHONPATH=tests $(RUN) tests/decisions/decision_table.py --write

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# mypy does not see that patterns/ installs as fp4_inductor.patterns, so it is shown the tree as installed.
types: $(READY)
	rm -rf build/types && mkdir -p build/types
	cp -R fp4_inductor build/types && cp -R patterns build/types/fp4_inductor
	cd build/types && $(RUN) -m mypy -n $(WORKERS) --config-file "$(CURDIR)/pyproject.toml" -p fp4_inductor

build: $(READY)
	$(RUN) -m build --no-isolation

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis depyf_dump
