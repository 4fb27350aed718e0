# Everything runs from .venv, which the first target that needs it makes.
VENV := .venv
RUN := $(VENV)/bin/python
# Editable installations hold absolute paths: the mark of a finished one names the folder it was made in.
MARK := $(VENV)/installed-$(shell pwd | cksum | cut -d' ' -f1)

.PHONY: help pretrain test lint bench clean

help:
	@echo 'make pretrain   train the small model; settings: make pretrain ARGS="train.steps=100 indexer.topk=8"'
	@echo 'make test       run the tests; pytest options: make test ARGS="-k config"'
	@echo 'make lint       check the style'
	@echo 'make bench      time the operation; options: make bench ARGS="--help"'
	@echo 'make clean      remove the environment and what the tools left, but no outputs'
	@echo
	@echo 'The first call installs into $(VENV), with the first Python >= 3.12 found or with PYTHON=/path/to/python.'

pretrain: $(MARK)
	@$(RUN) -m nemo_v4_indexer.pretrain $(ARGS)

# Tests that start several processes would fight over the cores if each process took all of them.
test: $(MARK)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest $(ARGS)

lint: $(MARK)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

bench: $(MARK)
	@$(RUN) scripts/bench.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MARK): pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh $(VENV) $@ $(PYTHON)
