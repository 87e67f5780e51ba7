# make demo   the main job, from nothing       make test   every test
# make lint   ruff, mypy --strict, import-linter  make bench  inference against eager, inductor, ONNX Runtime, OpenVINO
# make ops    PyTorch's operator database      make setup  the environment that all of them share
# make bench-export   exports against torch.onnx.export, and their models in ONNX Runtime and OpenVINO
# make bench-engines  every installed engine, what auto chooses, eager and inductor; and how soon a second process starts
# make bench-against REVISION=v0.2.0   inference, training, exports and the device ort against an earlier revision of
#                     sardonyx, in turns; models that are slower by more than 3 % are listed; AGAINST="--suites export"
# make customop-versions  packed custom operators in onnxruntime 1.18, 1.24 and 1.31, each in a process of its own
# make bench-customop  what an operator declared once costs, beside one written by hand for torch
# make native-versions  natively compiled models in onnxruntime 1.18, 1.24 and 1.31, each in a process of its own
# make bench-native   native kernels against ONNX Runtime's own, region by region and in whole models, one thread and two
# make native-checks  every onnx node test of an operator that has a kernel, in all types, and 600 random graphs; and
#                     the same of kernels for a GPU, under an imitation of CUDA
# make plots  the plot in README.md, drawn from benchmarks/results
# make docs   the documentation as a site in build/site; the code in its pages is run
# make wheel       the source distribution and, built from it, the wheel, in dist/
# make wheel-test  the wheel alone in fresh environments, with the oldest and the newest torch and Python; see
#                  python -m tests.wheel --help for WHEEL_TEST, as in WHEEL_TEST="--torch 2.13.0 --keep"
# make test TORCH=2.11.0 ONNXRUNTIME=1.24.1 VENV=build/oldest   any target, with other versions than the pinned ones
# make bench-eager   the device ort against the CPU
# make eager-ops     PyTorch's operator database on the device ort, strictly and with fallback; eager-ops-quick for three
#                    samples of each
# make eager-stress  random programs on the device's core, built with the address sanitizer, for twenty minutes
# make bench-precision  models in bfloat16, int8 and int4 against inductor, ONNX Runtime, torchao and OpenVINO with NNCF,
#                     which are installed in build/precision-peers, errors beside times; PRECISION="--models bert-base"
# make bench-generate  language models that generate tokens, against eager, optimum-onnx and onnxruntime-genai, which are
#                     installed in build/generate-optimum and build/generate-genai; GENERATE="--models llama --rounds 3"
# make bench-train    training steps against eager and inductor, and the memory held over a thousand of them
# make train-sweep   a training step of every module and of whole architectures, against double precision
# make ops-full   every sample of the database and those at the edges, in all dtypes: two hours, and it goes on where it
#                 was interrupted; SWEEP="--earlier docs/operators.json --minutes 60" renews the oldest results for an hour
# make cuda-checks  tests, architectures and operators on a GPU, in float32, float16 and bfloat16; CUDA_PYTHON is a Python
#                 with sardonyx[gpu] and the packages of the extras demo and dev
# make fuzz       random programs through every door for an hour, against eager; SEED=n begins with another batch
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
DTYPES := float32,float64,float16,bfloat16,int64,int32,int16,int8,uint8,uint16,uint32,uint64,bool
PAGE   := $(BIN)/python -m tests.ops.page docs/operators.json docs/eager-operators.json docs/operators.md
MINUTES ?= 20
FUZZ_MINUTES ?= 60
SEED ?= 0
WHEEL_TEST ?=
REVISION ?=
AGAINST ?=
SWEEP ?=
PRECISION ?=
GENERATE ?=
CUDA_PYTHON ?= python3
TORCH       ?= $(shell sed -n 's/^torch==//p' constraints.txt)
ONNXRUNTIME ?= $(shell sed -n 's/^onnxruntime==//p' constraints.txt)
PINS   := $(VENV)/constraints.txt
PRECISION_PEERS := build/precision-peers
GENERATE_PEERS := build/generate-optimum/.ready build/generate-genai/.ready
ORTS   := build/onnxruntime-1.18 build/onnxruntime-1.24 build/onnxruntime-1.31

.PHONY: setup demo test lint format bench bench-against bench-customop bench-eager bench-engines bench-export bench-generate bench-native bench-precision bench-train native-checks native-versions customop-versions eager-ops eager-ops-quick eager-stress cuda-checks fuzz ops ops-full train-sweep plots docs wheel wheel-test clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sardonyx needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^onnxruntime==.*/onnxruntime==$(ONNXRUNTIME)/' constraints.txt >$(PINS)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(PINS) torch
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[cpu,demo,dev]'
	touch $(READY)

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --maxfail 25 --durations 8

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS): $(READY)
	for peer in openvino iree; do $(BIN)/python -m pip install --quiet --constraint $(PINS) ".[$$peer]" || \
		echo "$$peer cannot be installed here; the others are measured without it"; done
	touch $(PEERS)

bench: $(PEERS)
	$(BIN)/python -m benchmarks.inference --json build/inference.json

eager-stress: setup
	SARDONYX_CORE_FLAGS="-fsanitize=address -g" ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m tests.eager.stress --minutes $(MINUTES) --executor native

bench-native: setup
	$(BIN)/python -m pip install --quiet --no-deps silero-vad magika || \
		echo "the files of silero-vad and magika cannot be had here; models are measured without them"
	$(BIN)/python -m benchmarks.native --json build/native.json
	$(BIN)/python -m benchmarks.native_models --json build/native-models.json

native-checks: setup
	$(BIN)/python -m tests.native.node_tests --write
	$(BIN)/python -m tests.native.random --graphs 600
	$(BIN)/python -m tests.native.cuda_on_cpu --graphs 50
	$(BIN)/python -m tests.native.edges

native-versions: $(ORTS)
	SARDONYX_ORT_PYTHONS=$$(echo $(ORTS:%=$(CURDIR)/%/bin/python) | tr ' ' :) \
		$(BIN)/python -m pytest tests/native/test_folder.py -k only_onnxruntime

bench-eager: setup
	$(BIN)/python -m benchmarks.eager --json build/eager.json

bench-engines: $(PEERS)
	$(BIN)/python -m benchmarks.engines_compared --rounds 21 --json build/engines.json
	$(BIN)/python -m benchmarks.startup --json build/startup.json

build/onnxruntime-1.18: NUMPY := numpy<2
build/onnxruntime-%: NUMPY := numpy
build/onnxruntime-%: | $(READY)
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --quiet 'onnxruntime==$*.*' '$(NUMPY)' || { rm -rf $@; exit 1; }

customop-versions: $(ORTS)
	SARDONYX_ORT_PYTHONS=$$(echo $(ORTS:%=$(CURDIR)/%/bin/python) | tr ' ' :) \
		$(BIN)/python -m pytest tests/customop/test_tooling.py -k only_onnxruntime

bench-against: setup
	$(BIN)/python -m benchmarks.against --json build/against.json $(AGAINST) -- $(REVISION)

bench-customop: setup
	$(BIN)/python -m benchmarks.custom_op --json build/custom-op.json

bench-export: $(PEERS)
	$(BIN)/python -m benchmarks.export --json build/export.json

$(PRECISION_PEERS)/.ready: $(READY)
	$(BIN)/python -m venv $(PRECISION_PEERS)
	$(PRECISION_PEERS)/bin/python -m pip install --quiet --constraint $(PINS) torch
	$(PRECISION_PEERS)/bin/python -m pip install --quiet --constraint $(PINS) --editable '.[cpu,demo]'
	for peer in openvino nncf torchao; do \
		$(PRECISION_PEERS)/bin/python -m pip install --quiet --constraint $(PINS) $$peer || \
		echo "$$peer cannot be installed here; its rows say so"; done
	touch $@

bench-precision: $(PRECISION_PEERS)/.ready
	$(BIN)/python -m benchmarks.precision --peers $(PRECISION_PEERS)/bin/python --json build/precision.json $(PRECISION)
	$(BIN)/python -m benchmarks.precision_accuracy --json build/precision-accuracy.json
	$(BIN)/python -m benchmarks.precision_guard --json build/precision-guard.json

build/generate-optimum/.ready: PACKAGES := 'optimum-onnx[onnxruntime]'
build/generate-genai/.ready: PACKAGES := --constraint $(PINS) onnxruntime-genai onnx-ir transformers
$(GENERATE_PEERS): $(READY)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(PINS) torch numpy rich
	$(@D)/bin/python -m pip install --quiet 'torch==$(TORCH)' $(PACKAGES) || \
		echo "the packages of $(@D) cannot be installed here; their rows say so"
	touch $@

bench-generate: $(GENERATE_PEERS)
	$(BIN)/python -m benchmarks.generate --json build/generate.json $(GENERATE)

bench-train: setup
	$(BIN)/python -m benchmarks.training --json build/training.json
	$(BIN)/python -m benchmarks.training --engines sardonyx --memory 1000 --json build/training-memory.json

ops: setup
	$(BIN)/python -m tests.ops.sweep --quick --dtypes $(DTYPES) --page build/operators.md

ops-full: setup
	$(BIN)/python -m tests.ops.sweep --resume --export --dtypes $(DTYPES) --results build/operators-full.json $(SWEEP)
	cp build/operators-full.json docs/operators.json
	$(PAGE)

eager-ops: setup
	$(BIN)/python -m tests.ops.sweep --device ort --executor native --resume --dtypes $(DTYPES) --results build/eager-operators.json $(SWEEP)
	cp build/eager-operators.json docs/eager-operators.json
	$(PAGE)

eager-ops-quick: setup
	$(BIN)/python -m tests.ops.sweep --device ort --quick --results build/eager-quick.json --page build/eager-operators.md

fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES) --first $(SEED) --results build/fuzz.json
	cp build/fuzz.json docs/fuzz.json

cuda-checks:
	$(CUDA_PYTHON) -m pytest tests/run/test_cuda.py
	$(CUDA_PYTHON) -m tests.models.cuda --results docs/cuda-models.json
	$(CUDA_PYTHON) -m tests.ops.sweep --device cuda --quick --dtypes float32,float16,bfloat16 --results docs/cuda-operators.json

train-sweep: setup
	$(BIN)/python -m tests.train.sweep --results docs/training-sweep.json --page docs/training-sweep.md

plots: setup
	$(BIN)/python -m benchmarks.plot

docs: setup
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/site

wheel: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist

wheel-test: wheel
	$(BIN)/python -m tests.wheel $(WHEEL_TEST)

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache
