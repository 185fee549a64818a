# `make train` and `make test` do all set-up on a fresh machine: a virtual environment in .venv, then the work.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = sh tools/environment.sh install $(VENV)
ARGS ?= recipe=llama_tiny precision=bf16_fp8

.PHONY: train test test-all test-fake-gpu test-fake-gpu-te test-fake-gpu-torch check docs clean

# What was installed went with a Python that is gone.
ifeq ($(wildcard $(BIN)/python),)
$(shell rm -f $(VENV)/.installed $(VENV)/.tested-with)
endif

train: $(VENV)/.installed
	$(BIN)/python -m fp8cfg $(ARGS)

# Bytecode is written, whatever the environment says: else each worker and each process of a test compiles every module again. A file's
# tests are one worker's, which makes what they share once.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.tested-with
	$(PYTEST) -m "not slow" $(TESTS)

# The same with every example of the property tests, and then what it leaves out (tests/slow.toml, and tests marked slow).
test-all: export PYTHONDONTWRITEBYTECODE =
test-all: export FP8CFG_ALL_EXAMPLES = 1
test-all: test
	$(PYTEST) -m slow $(TESTS)

# Launches, copies and waits of the GPU path on a machine without a GPU (tools/fake_gpu/README.md); not part of the gate. It makes an
# environment of its own, 2.1 GB, unless FAKE_GPU_PYTHON has torch's build for CUDA 13.
FAKE_GPU ?= .fake-gpu
FAKE_GPU_PYTHON ?=
ON_FAKE_GPU = . $(abspath $(FAKE_GPU))/env.sh && $$FAKE_GPU_PYTHON

test-fake-gpu:
	@PYTHON=$(PYTHON) FAKE_GPU_PYTHON=$(FAKE_GPU_PYTHON) sh tools/fake_gpu/setup.sh $(FAKE_GPU)
	$(ON_FAKE_GPU) -m pytest -p no:cacheprovider tests/fake_gpu
	$(ON_FAKE_GPU) -m tools.fake_gpu.kernel_code
	FAKE_CC=100; export FAKE_CC; $(ON_FAKE_GPU) -m pytest -p no:cacheprovider tests/fake_gpu/test_valued_jobs.py tests/fake_gpu/test_microscaled_products.py tests/fake_gpu/test_kernel_code.py tests/fake_gpu/test_planned_memory.py
	FAKE_CC=100; export FAKE_CC; $(ON_FAKE_GPU) -m tools.fake_gpu.kernel_code
	FAKE_CC=100; export FAKE_CC; $(ON_FAKE_GPU) -m tools.fake_gpu.table
	$(ON_FAKE_GPU) -m tools.fake_gpu.table
	$(ON_FAKE_GPU) tools/report_gpu.py --no-proof --minutes 45 --row-seconds 300 --steps 2 --out $(FAKE_GPU)/report.txt

# Transformer Engine's own C++ there: jobs with backend=te, launches of its layers, rows of check_gpu.py and bench_gpu.py. Builds it first, a quarter of an hour.
ON_FAKE_TE = . $(abspath $(FAKE_GPU))/env.sh && . $(abspath $(FAKE_GPU))/te.sh && $$FAKE_GPU_PYTHON

test-fake-gpu-te:
	@PYTHON=$(PYTHON) FAKE_GPU_PYTHON=$(FAKE_GPU_PYTHON) sh tools/fake_gpu/setup.sh $(FAKE_GPU)
	@sh tools/fake_gpu/setup_te.sh $(FAKE_GPU)
	@for FAKE_CC in 90 100; do export FAKE_CC; ($(ON_FAKE_TE) -m pytest -p no:cacheprovider tests/fake_gpu/test_transformer_engine.py) || exit 1; \
	    ($(ON_FAKE_TE) -m pytest -p no:cacheprovider tests/fake_gpu/test_planned_memory.py -k 'te-none or te-full') || exit 1; \
	    ($(ON_FAKE_TE) -m tools.fake_gpu.table te) || exit 1; \
	    ($(ON_FAKE_TE) tools/check_gpu.py --no-proof --steps 2 --row-seconds 300 --minutes 30 --only te) || exit 1; \
	    ($(ON_FAKE_TE) tools/bench_gpu.py --no-proof --no-probe --row-seconds 300 --minutes 30 --only te) || exit 1; done

# The tests on another version of torch's CUDA build, in an environment of its own; ceilings of launches are those of the oldest.
FAKE_TORCH ?= 2.13.0
OTHER_FAKE_GPU = $(FAKE_GPU)-$(FAKE_TORCH)

test-fake-gpu-torch:
	@PYTHON=$(PYTHON) sh tools/fake_gpu/setup.sh $(OTHER_FAKE_GPU) $(FAKE_TORCH)
	. $(abspath $(OTHER_FAKE_GPU))/env.sh && $$FAKE_GPU_PYTHON -m pytest -p no:cacheprovider tests/fake_gpu

check: $(VENV)/.tested-with
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_prose.py

# The site, build/site/index.html, from the Markdown files; not part of the gate. Zensical reads only below the folder of its settings.
docs: $(VENV)/.installed
	@$(INSTALL) --editable '.[docs]'
	rm -rf build/pages build/site && mkdir -p build/pages/tools/fake_gpu
	cp -r README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples conf build/pages
	cp tools/fake_gpu/README.md build/pages/tools/fake_gpu
	cp docs/mkdocs.yml build
	$(BIN)/zensical build --strict --config-file build/mkdocs.yml

# torch is installed first and alone, at its exact version: any other request would pull gigabytes of CUDA packages.
$(VENV)/.installed: constraints.txt pyproject.toml
	@sh tools/environment.sh make $(PYTHON) $(VENV)
	@$(INSTALL) -c constraints.txt torch==2.13.0
	@$(INSTALL) -c constraints.txt --editable .
	touch $@

# Oracles for tests: Transformer Engine's recipe classes and reference quantizers import on a CPU without its compiled part;
# torchao trains on one. Triton interprets our kernels there.
$(VENV)/.tested-with: $(VENV)/.installed
	@$(INSTALL) -c constraints.txt --editable '.[dev]'
	@$(INSTALL) --no-deps transformer-engine==2.20.2 torchao==0.18.0 triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) .fake-gpu .fake-gpu-* build dist .pytest_cache .mypy_cache .ruff_cache
