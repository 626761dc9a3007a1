#!/usr/bin/env bash
# Prints what calls cost, as ratios against an unsandboxed process, measured
# side by side in one run.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/deps.sh python3=python3 mke2fs=e2fsprogs
go build -trimpath -o bin/bigwave-bench ./runner/cmd/bench
exec scripts/with-postgres.sh bin/bigwave-bench "$@"
