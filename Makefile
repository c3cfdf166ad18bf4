# Two commands matter: `make demo` and `make test`. Both make .venv first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
# What .venv holds: extras of pyproject.toml. Each set that was installed leaves a stamp.
DEMO := .venv/.with-torch
STAMP := .venv/.with-torch,dev,schemas,frameworks,browser
SITE_STAMP := .venv/.with-docs
SITE := build/site
# A process that measures itself must not share its cores with a pool of math threads.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Every process of the tests would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo pictures stack test stress lint types unit gpu bench peers programs docs site dist matrix clean

.venv/.with-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

demo: $(DEMO)
	$(BIN)/otel-ddp demo --inject backward:1:30ms

# Of docs/page.md: real trainings, in a real Chromium. Three minutes.
pictures: $(STAMP)
	$(BIN)/python -m tools.pictures

stack: $(DEMO)
	$(BIN)/python -m tools.stack

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python -m tools.totals

types: $(STAMP)
	$(BIN)/mypy --no-error-summary

# The real servers are built once, which takes minutes; without them their tests say so. Tests wait
# more than they compute: more of them at a time than there are processors. Those that measure time
# come last, three at a time, from the files that name their mark: reading all files takes as long as
# some tests. A process of theirs that dies is a failure and not replaced: pytest-xdist may then wait
# for ever.
unit: BY_FILE = --dist loadfile --no-loadscope-reorder --max-worker-restart 0
unit: TIMED = $(shell grep -rl --include='test_*.py' 'mark\.timed' tests)
unit: $(STAMP)
	-$(BIN)/python -m tools.stack build
	$(BIN)/python -m pytest -m 'not stress and not timed' -n 8 $(BY_FILE)
	$(BIN)/python -m pytest -m 'timed and not stress' -n 3 $(BY_FILE) $(TIMED)

# What takes long to show more of what `make test` shows: every moment of a signal, the long fleets.
# SwanLab has an environment of its own: it takes an older protobuf than the others.
stress: .venv/.with-torch,dev,schemas,frameworks,browser,deepspeed,ray
	-$(BIN)/python -m tools.stack build
	$(BIN)/python -m pytest -m stress
	test -x .venv-swanlab/bin/python || $(PYTHON) -m venv .venv-swanlab
	.venv-swanlab/bin/python -m pip install --quiet --editable '.[torch,dev,swanlab]'
	.venv-swanlab/bin/python -m pytest -k swanlab tests/integrations/test_trackers.py

# What a device can show, as tables in build/gpu.md: ten minutes. Torch is the machine's own, and the
# device as well, if it has one.
# WHEELS names a folder of wheels for a machine without an index; docs/gpu.md says how to fill it.
gpu:
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) --editable '.[gpu]'
	.venv-gpu/bin/python tools/gpu_table.py

bench: $(STAMP)
	$(BIN)/python bench/bench.py

# The same beside other tools, which it installs into an environment of their own.
peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement bench/peers.txt --editable '.[torch,dev]'
	.venv-peers/bin/python bench/peers.py

# Programs of others, each in an environment of its own: an hour, and 20 GB. Their repositories are
# fetched. docs/internals/programs.md has what was found.
programs: .venv/.with-torch,programs
	$(BIN)/python -m tools.programs

docs: $(STAMP)
	$(BIN)/python -m tools.docs

# A wheel and a source distribution, in dist/.
dist: .venv/.with-torch,dev,release
	$(BIN)/python -m hatchling build --clean
	$(BIN)/python -m twine check --strict dist/*

# That wheel alone, on every Python that is here and torch old and new: noxfile.py. Half an hour
# of two cores, 40 GB of the disk.
matrix: dist
	$(BIN)/nox $(if $(PYTHONS),--python $(PYTHONS))

# Every warning is an error, a link to a page or a heading that is not there among them. What a
# page loads has to come with it.
site: $(SITE_STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --fresh-env --write-all docs $(SITE)
	! grep -rlE '<(script|img|link|iframe)[^>]* (src|href)="(https?:)?//' --include='*.html' $(SITE)
	@echo "The site is in $(SITE): open $(SITE)/index.html"

clean:
	rm -rf .nox .venv .venv-gpu .venv-peers .venv-swanlab dist build
