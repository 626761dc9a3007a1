#!/usr/bin/env bash
# Prints what calls cost, as ratios against an unsandboxed process, measured
# side by side in one run. As root with a containerd of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/deps.sh python3=python3 mke2fs=e2fsprogs
go build -trimpath -o bin/bigwave-bench ./runner/cmd/bench
if ((EUID != 0)); then
	exec scripts/with-postgres.sh bin/bigwave-bench "$@"
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
scripts/image-root.sh "$(scripts/image.sh)" "$root"
# shellcheck disable=SC2016
BIGWAVE_BENCH_ROOT=$root scripts/with-containerd.sh bash -c '
	env CONTAINERD_NAMESPACE=bigwave scripts/image.sh >/dev/null
	exec scripts/with-postgres.sh bin/bigwave-bench "$@"' bash "$@"
