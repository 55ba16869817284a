# Hoist. `make serve` and `make test` do everything on a fresh machine.
#
#   make            the program, build/hoist
#   make serve      serve the bundled demo model on 127.0.0.1:30000
#   make test       all tests that need no GPU      SAN=address,undefined | SAN=thread
#   make test-gpu   those that need one
#   make scorecard  docs/scorecard.md: what passes, per dialect and feature
#   make check      layers, sizes, banned functions, formatting
#   make portable   build/hoist-portable: libraries linked in, for any x86-64 glibc >= 2.36
#   make fuzz       every fuzz target for FUZZ_SECONDS each
#   make soak       clients for SOAK_SECONDS (an hour): no error, memory flat
#   make bench      speed of the demo model on this machine
# CUDA=0 leaves the GPU code out.

ifeq ($(origin CC),default)
CC      := gcc
endif
SAN     ?=
OPT     ?= -O2 -g
PORT    ?= 30000
MODEL   ?= models/demo-exl3

comma   := ,
CCNAME  := $(notdir $(firstword $(CC)))
VARIANT := $(CCNAME)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(PORTABLE)
OBJ     := obj/$(VARIANT)
# The plain build is build/; other compilers and sanitizers get a folder of their own.
BUILD   := $(if $(filter gcc cc,$(VARIANT)),build,build/$(VARIANT))

WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wwrite-strings \
           -Wpointer-arith -Wvla -Wformat=2 -Werror
CFLAGS  := -std=c11 -D_GNU_SOURCE $(OPT) -ffp-contract=off -fno-math-errno -pthread $(WARN) \
           -Iinclude -Isrc -I$(BUILD)/gen -isystem /usr/share/include/llhttp -MMD -MP \
           $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
LDFLAGS := -pthread $(if $(SAN),-fsanitize=$(SAN))
LIBS    := -luv -ljson-c -lpcre2-8 -lutf8proc -lxxhash -lcrypto -ldl -lm

# GPU code comes along where a GPU (under WSL: its driver) and nvcc are; the runtime is linked in
# and finds the driver when the program runs. Plain builds carry machine code for the GPUs of this
# machine (without any: Hopper), and PTX for the others.
ifeq ($(origin NVCC),undefined)
NVCC    := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
endif
GPU     := $(wildcard /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1)
CUDA    ?= $(if $(and $(NVCC),$(GPU)),$(if $(SAN),0,1),0)
ALL_ARCH := sm_80 sm_86 sm_89 sm_90a sm_120a sm_121a
HERE    := $(if $(GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
             sort -u | sed -n 's/^\([89]\|1[0-9]\)\.\([0-9]\)$$/sm_\1\2/p' | sed 's/^sm_\(9\|1[0-9]\).$$/&a/'))
ARCH    := $(if $(PORTABLE),$(ALL_ARCH),$(or $(HERE),sm_90a))
NVFLAGS := -std=c++17 -O3 --fmad=false -Iinclude -Isrc -Xcompiler -Wall \
           -gencode arch=compute_80,code=compute_80 \
           $(foreach a,$(ARCH),-gencode arch=$(a:sm_%=compute_%),code=$(a))
ifneq ($(GPU),)
$(if $(NVCC),,$(info no nvcc beside this GPU: building for the CPU only; install a CUDA toolkit for both))
endif
ifeq ($(CUDA),1)
CUDA_LIBS := $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#\$$ LIBRARIES=//p') -lcudart_static -ldl -lrt
LIBS    += $(CUDA_LIBS) -lstdc++
CU_OBJS := $(patsubst %.cu,$(OBJ)/%.cu.o,$(wildcard src/*/*.cu))
endif

# TLS where OpenSSL's headers are; else `serve` says that it has none.
TLS     ?= $(if $(wildcard /usr/include/openssl/ssl.h),1,0)
TLS_LIBS := $(if $(filter 1,$(TLS)),-lssl -lcrypto)
LIBS    += $(TLS_LIBS)

SRC     := $(filter-out %_test.c,$(wildcard src/*/*.c))
LIB_SRC := $(filter-out src/cli/main.c,$(SRC))
TESTS   := $(wildcard src/*/*_test.c)
OBJS    := $(SRC:%.c=$(OBJ)/%.o)
LLHTTP  := $(patsubst %,$(OBJ)/llhttp/%.o,api http llhttp)
LIB     := $(OBJ)/libhoist.a
TESTBIN := $(patsubst %.c,$(BUILD)/test/%,$(notdir $(TESTS)))

.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: all serve deps deps-test test test-gpu cuda-all test-unit test-ops test-tiny test-run check scorecard soak portable fuzz bench \
        man install clean format

all: $(BUILD)/hoist

# -Wconversion where sizes come from strangers.
$(OBJ)/src/base/%.o $(OBJ)/src/text/%.o: CFLAGS += -Wconversion
$(OBJ)/src/serve/http_tls.o: CFLAGS += $(if $(filter 1,$(TLS)),-DHX_TLS)
$(OBJ)/src/serve/http_tls.o: $(OBJ)/tls-$(TLS)
$(OBJ)/tls-$(TLS):
	@mkdir -p $(@D)
	@rm -f $(@D)/tls-*
	@touch $@
# The one file that names the CUDA backend is compiled anew when CUDA changes.
$(OBJ)/src/dev/ops.o: CFLAGS += $(if $(filter 1,$(CUDA)),-DHX_CUDA)
$(OBJ)/src/dev/ops.o: $(OBJ)/cuda-$(CUDA)
$(OBJ)/cuda-$(CUDA):
	@mkdir -p $(@D)
	@rm -f $(@D)/cuda-*
	@touch $@
$(OBJ)/%_test.o: CFLAGS += -Wno-missing-prototypes -Wno-conversion

# Files that the program carries, as C arrays.
EMBED := glm_5_3_flash_json:models/synthetic/glm-5.3-flash.json \
         routing_json:models/synthetic/routing.json openapi_json:docs/openapi.json
GEN   := $(foreach e,$(EMBED),$(BUILD)/gen/$(firstword $(subst :, ,$(e))).h)
$(BUILD)/embed: tools/embed.c
	@mkdir -p $(@D)
	$(CC) -O1 -Wall $< -o $@
define embed_rule
$(BUILD)/gen/$(1).h: $(2) $(BUILD)/embed
	@mkdir -p $$(@D)
	$(BUILD)/embed $(1) < $(2) > $$@
endef
$(foreach e,$(EMBED),$(eval $(call embed_rule,$(firstword $(subst :, ,$(e))),$(lastword $(subst :, ,$(e))))))

$(OBJ)/%.o: %.c Makefile | $(GEN)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@

$(OBJ)/%.cu.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(OBJ)/llhttp/%.o: /usr/share/llhttp/%.c
	@mkdir -p $(@D)
	$(CC) $(OPT) -pthread -isystem /usr/share/include/llhttp $(if $(SAN),-fsanitize=$(SAN)) -c $< -o $@

$(LIB): $(filter-out $(OBJ)/src/cli/main.o,$(OBJS)) $(CU_OBJS) $(LLHTTP)
	@mkdir -p $(@D)
	@rm -f $@
	ar rcs $@ $^

$(BUILD)/hoist: $(OBJ)/src/cli/main.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ $(LIBS) -o $@

# Each x_test.c is a program of its own; it may include x.c, whose object is then not
# taken from the archive.
define test_rule
$(BUILD)/test/$(basename $(notdir $(1))): $(OBJ)/$(1:.c=.o) $(LIB)
	@mkdir -p $$(@D)
	$(CC) $(LDFLAGS) $$^ -lcmocka $(LIBS) -o $$@
endef
$(foreach t,$(TESTS),$(eval $(call test_rule,$(t))))

$(BUILD)/test/%_driver: tests/%_driver.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(filter-out -MMD -MP,$(CFLAGS)) $(LDFLAGS) $^ $(LIBS) -o $@

# The corpora of fuzz/ replayed by the plain build.
REPLAY := $(patsubst fuzz/%_fuzz.c,$(BUILD)/test/%_replay,$(wildcard fuzz/*_fuzz.c))
$(BUILD)/test/%_replay: tests/fuzz_replay.c fuzz/%_fuzz.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(filter-out -MMD -MP,$(CFLAGS)) -Wno-missing-prototypes $(LDFLAGS) $^ $(LIBS) -o $@

deps:
	@tools/deps.sh
deps-test:
	@tools/deps.sh test

serve: deps
	@$(MAKE) --no-print-directory all
	@exec $(BUILD)/hoist serve $(MODEL) --port $(PORT)

# deps first, then the rest in a new make: header files and libraries may just have come.
test: deps-test
	@$(MAKE) --no-print-directory test-run

test-run: $(BUILD)/hoist $(TESTBIN) $(BUILD)/test/tok_driver $(BUILD)/test/grammar_driver $(REPLAY)
	@tests/run.sh $(BUILD)

test-unit: deps-test
	@$(MAKE) --no-print-directory $(TESTBIN)
	@tests/run.sh $(BUILD) unit

test-ops: deps-test
	@$(MAKE) --no-print-directory $(BUILD)/test/ops_test $(BUILD)/test/ops_args_test $(BUILD)/test/fmt_test $(BUILD)/test/canon_test
	@tests/run.sh $(BUILD) ops

test-tiny: deps-test
	@$(MAKE) --no-print-directory $(BUILD)/hoist $(BUILD)/test/model_test $(BUILD)/test/engine_test
	@tests/run.sh $(BUILD) tiny

# Hundreds of clients for an hour: 64 streams, 2,000 idle connections, a third leave early.
SOAK_SECONDS ?= 3600
soak: all
	@tests/suite_serving.sh $(BUILD) $(SOAK_SECONDS)

# Everything that needs a GPU: kernels by themselves, then through the engine.
GPU_TESTS := ops_test model_test graph_test store_test lend_test health_test
test-gpu: deps-test
	@$(MAKE) --no-print-directory CUDA=1 $(GPU_TESTS:%=$(BUILD)/test/%)
	@ARCH="$(foreach a,$(ARCH),-gencode arch=$(a:sm_%=compute_%),code=$(a))" tests/gpu_all.sh $(BUILD)

# The GPU code for every GPU that it runs on.
cuda-all:
	@$(MAKE) --no-print-directory CUDA=1 PORTABLE=-portable $(patsubst src/%.cu,obj/gcc-portable/src/%.cu.o,$(wildcard src/*/*.cu))

check:
	@tools/check.sh

scorecard: deps-test
	@$(MAKE) --no-print-directory $(BUILD)/hoist
	@tests/scorecard.sh $(BUILD)

# One file that needs only glibc, with machine code for every GPU that it runs on.
STATIC_LIBS := -Wl,-Bstatic -luv_a -ljson-c -lpcre2-8 -lutf8proc -lxxhash $(if $(TLS_LIBS),$(TLS_LIBS),-lcrypto) $(if $(CUDA_LIBS),$(CUDA_LIBS) -lstdc++) \
               -Wl,-Bdynamic -ldl -lrt -lm
portable: deps
	@$(MAKE) --no-print-directory PORTABLE=-portable build/hoist-portable
build/hoist-portable: $(OBJ)/src/cli/main.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -static-libgcc $^ $(STATIC_LIBS) -o $@

FUZZ_SECONDS ?= 30
FUZZERS := $(patsubst fuzz/%_fuzz.c,%,$(wildcard fuzz/*_fuzz.c))
build/fuzz/%: fuzz/%_fuzz.c $(LIB_SRC) | $(GEN)
	@mkdir -p $(@D)
	clang -std=c11 -D_GNU_SOURCE -O1 -g -ffp-contract=off -pthread -Iinclude -Isrc -I$(BUILD)/gen \
	    -isystem /usr/share/include/llhttp -fsanitize=fuzzer,address,undefined \
	    $< $(LIB_SRC) /usr/share/llhttp/*.c $(LIBS) -o $@
fuzz: deps-test
	@for f in $(FUZZERS); do \
	    $(MAKE) --no-print-directory build/fuzz/$$f && mkdir -p build/fuzz/new/$$f && \
	    build/fuzz/$$f -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2048 -timeout=10 \
	        build/fuzz/new/$$f fuzz/corpus/$$f || exit 1; done

bench: all
	$(BUILD)/hoist bench $(MODEL)

man: all
	$(BUILD)/hoist --man > $(BUILD)/hoist.1

PREFIX ?= /usr/local
install: all man
	install -D $(BUILD)/hoist $(DESTDIR)$(PREFIX)/bin/hoist
	install -D -m 644 $(BUILD)/hoist.1 $(DESTDIR)$(PREFIX)/share/man/man1/hoist.1
	mkdir -p $(DESTDIR)$(PREFIX)/share/hoist
	cp -r models/demo-exl3 $(DESTDIR)$(PREFIX)/share/hoist/

format:
	clang-format -i $$(git ls-files '*.c' '*.h')

clean:
	rm -rf obj build

-include $(OBJS:.o=.d) $(CU_OBJS:.o=.d) $(TESTS:%.c=$(OBJ)/%.d)
