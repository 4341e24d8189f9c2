PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env demo test lint protos protos-check clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "making $(VENV) (once; a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sealring needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: env
	@$(BIN)/sealring demo $(if $(ONCE),--once) $(ARGS)

test: env
	@$(BIN)/python -m pytest $(ARGS)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cd protos && ../$(BIN)/buf lint

protos: env
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --mypy_out=. --mypy_grpc_out=. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc protos/sealring/v1/*.proto

protos-check: protos
	@git diff --exit-code --stat -- sealring/v1

clean:
	@rm -rf $(VENV) build *.egg-info
