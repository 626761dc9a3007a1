# The commands of the project. Each does its own set-up; see README.md.

export CGO_ENABLED ?= 0

# What isolates user code in make up and make demo: subprocess or containerd.
export BACKEND ?= subprocess

.PHONY: build image up demo test bench lint clean

# The daemons and the program that is pid 1 in every sandbox.
build:
	go build -buildvcs=false -trimpath -o bin/bigwave-controlplane ./controlplane/cmd/controlplane
	go build -buildvcs=false -trimpath -o bin/bigwave-runner ./runner/cmd/runner
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o bin/bigwave-init ./runner/cmd/init

# The sandboxes' base image for containerd; prints where its archive lies.
image:
	@scripts/image.sh

# Both daemons in the foreground until SIGTERM or Ctrl-C.
up: build
	@scripts/deps.sh python3=python3 curl=curl $$(test "$$(id -u)" != 0 || echo mke2fs=e2fsprogs)
	@exec scripts/up.sh

# The whole walk-through on daemons of its own, in a data folder of its own.
demo: build
	@scripts/deps.sh python3=python3 curl=curl $$(test "$$(id -u)" != 0 || echo mke2fs=e2fsprogs)
	@exec scripts/demo-up.sh

# Every test, against real services that it starts itself.
test: build
	@scripts/test.sh

# What it costs, as ratios measured side by side; not a test.
bench: build
	@scripts/bench.sh

# What nobody has to look for in a review.
lint:
	@unformatted=$$(gofmt -l controlplane runner shared migrations); \
		test -z "$$unformatted" || { echo "gofmt -w" $$unformatted >&2; exit 1; }
	go vet work
	golangci-lint run ./controlplane/... ./runner/... ./shared/... ./migrations/...

clean:
	rm -rf bin
