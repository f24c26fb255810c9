# The front door: CMake does the building. `make help` lists the targets.
BUILD ?= build
PREFIX ?= /usr/local
ARCH ?= 90a
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
T ?=
GPU ?= build-gpu
STATIC ?= all gpu_tests
S ?= 60
# 1: the CUDA backend; emulated: its tests on the host, which need the toolkit's headers; 0: neither
CUDA ?= $(if $(wildcard /dev/nvidia0),$(if $(shell command -v nvcc),1,emulated),emulated)

CMAKE_FLAGS = -G Ninja -DNIBBLE_WERROR=$(if $(CI),ON,OFF) \
  -DNIBBLE_CUDA=$(if $(filter 1,$(CUDA)),ON,$(or $(filter emulated,$(CUDA)),OFF)) "-DNIBBLE_ARCH=$(ARCH)"
CONFIGURE = cmake -S . $(CMAKE_FLAGS)

.PHONY: all configure build binary demo gates test test-emulated deps lint fmt docs build-asan asan tsan fuzz bench test-faults test-interop test-gpu bench-gpu gpu static install uninstall clean help
all: build

# What has to be installed: tools/deps.sh. Only what builds the tests needs more than the program.
DEPS = build
test test-emulated test-faults lint: DEPS = build test

configure:
	@tools/deps.sh $(DEPS)
	@$(CONFIGURE) -B $(BUILD) > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

build: configure ## build $(BUILD)/nibble, and the tests if cmocka is there (CUDA=1 adds the CUDA backend, ARCH="80;90a" its architectures)
	@cmake --build $(BUILD) -j $(JOBS)

binary: configure
	@cmake --build $(BUILD) -j $(JOBS) --target nibble

# Who it is to be comes from the command line, not from what else is called so.
ifneq ($(origin NAME),command line)
unexport NAME
endif
ifneq ($(origin TARGET),command line)
unexport TARGET
endif

demo: binary ## teach a small model who it is (NAME=... or TARGET=...) and compare before and after; in ./demo
	@tools/demo.sh $(BUILD)/nibble demo

gates: binary ## check whoami with four identities and three seeds each, and a naive run that must fail (half an hour)
	@tools/gates.sh $(BUILD)/nibble build/gates

# ctest FOLDER OPTIONS: runs the tests of a build and lists those that skipped themselves.
ctest = @[ -e $(1)/tests/CTestTestfile.cmake ] || { echo "make: the tests were not built; make test alone installs what they need" >&2; exit 1; }; \
  ctest --test-dir $(1) --output-on-failure -j $(JOBS) $(2); status=$$?; \
  python3 -B tests/skipped.py $(1) && exit $$status

test: build ## build and run all tests that need no network, GPU or large model
	$(call ctest,$(BUILD),-LE every-order)

test-emulated: build ## run all tests of the CUDA kernels in the emulator, in four orders of threads (20 minutes of CPU)
	$(call ctest,$(BUILD),-R ^emulated/)

deps: ## install the packages for building and testing (with apt-get; on other systems list them)
	@tools/deps.sh build test lint fuzz

lint: build ## check include rules, sizes, names, headers, formatting, and run clang-tidy
	@tools/deps.sh lint
	@tools/lint/run.sh $(BUILD)

fmt: ## format all C sources
	@tools/deps.sh lint
	@tools/lint/format.sh -i

docs: binary ## write docs/cli from the option tables
	@$(BUILD)/nibble help --write-docs docs/cli

test-faults: build ## run every command with each of its allocations, reads, writes, ... failing once (hours)
	@python3 -B tests/faults/run.py $(BUILD)/nibble $(BUILD)/tests/inject.so

build-asan: # one build for the tests and the fuzz targets, by clang
	@tools/deps.sh build test fuzz
	@CC=clang CXX=clang++ $(CONFIGURE) -B build-asan -DNIBBLE_FUZZ=ON -DNIBBLE_SANITIZE=address,undefined > build-asan.log 2>&1 || { cat build-asan.log; exit 1; }
	@cmake --build build-asan -j $(JOBS)

asan: build-asan ## run the tests under AddressSanitizer and UndefinedBehaviorSanitizer, built with clang
	$(call ctest,build-asan,-LE every-order)

tsan: ## run the tests that use several threads under ThreadSanitizer
	@tools/deps.sh build test
	@$(CONFIGURE) -B build-tsan -DNIBBLE_SANITIZE=thread > build-tsan.log 2>&1 || { cat build-tsan.log; exit 1; }
	@cmake --build build-tsan -j $(JOBS) --target thread_tests
	$(call ctest,build-tsan,-L threads)

fuzz: build-asan ## fuzz the parsers for S=60 seconds each, JOBS at a time; T=NAME for one of tests/fuzz/targets
	@tests/fuzz/run.sh build-asan $(S) $(JOBS) $(T)

bench: binary ## measure the codec, and quantising a model of 4B shapes (needs 13 GB of disk)
	@bench/quantize.sh $(BUILD)/nibble

test-interop: build ## compare with safetensors, gguf, tokenizers and jinja2 from PyPI, in a virtual environment
	@tests/interop/run.sh $(BUILD)/nibble

test-gpu: ## run the tests that need a GPU, with the build in $(GPU) (see gpu): all, or WHAT="kernels bits" (WHAT=list)
	@tests/gpu/run.sh $(GPU) $(WHAT) || [ $$? -eq 77 ] # nothing to run on

bench-gpu: ## measure speed, memory and learning on a GPU, in the same way
	@bench/gpu.sh $(GPU) $(WHAT) || [ $$? -eq 77 ]

gpu: ## build with CUDA for another machine with a GPU: build-gpu, stripped
	@$(MAKE) --no-print-directory static CUDA=1 STATIC="nibble gpu_tests"
	@tools/pack_gpu.sh build-static $(GPU)

static: ## build a program and tests for other machines: small libraries linked statically, in build-static
	@tools/deps.sh build test
	@$(CONFIGURE) -B build-static -DNIBBLE_STATIC=ON > build-static.log 2>&1 || { cat build-static.log; exit 1; }
	@cmake --build build-static -j $(JOBS) --target $(STATIC)

install: configure ## install program, libraries, headers, man pages and completions into PREFIX=/usr/local (prefixed by DESTDIR)
	@cmake --build $(BUILD) -j $(JOBS) --target nibble libnibble libnibble_shared pages
	@cmake --install $(BUILD) --prefix $(PREFIX) --strip

uninstall: ## remove what make install installed (same PREFIX and DESTDIR)
	@tools/uninstall.sh $(BUILD) $(PREFIX)

clean: ## remove everything that was built
	@rm -rf build build-* build.log demo

help: ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/' | expand -t 18
