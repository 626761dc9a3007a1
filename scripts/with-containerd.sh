#!/usr/bin/env bash
# Runs a command with a containerd of its own, ended and removed with all that
# is in it when the command has: BIGWAVE_E2E_CONTAINERD says where it is,
# BIGWAVE_E2E_CONTAINERD_SNAPSHOTTER which snapshotter works there.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=$(mktemp -d) containerd=''
trap 'rm -rf --one-file-system "$dir"' EXIT
trap 'kill -TERM "$containerd" 2>/dev/null || true' HUP INT TERM

# shellcheck disable=SC2016
scripts/containerd.sh "$dir" bash -c '
	export BIGWAVE_E2E_CONTAINERD=$CONTAINERD_ADDRESS
	export BIGWAVE_E2E_CONTAINERD_SNAPSHOTTER=$CONTAINERD_SNAPSHOTTER
	exec "$@"' bash "$@" &
containerd=$!
status=0
wait "$containerd" || status=$?
while kill -0 "$containerd" 2>/dev/null; do
	status=0
	wait "$containerd" || status=$?
done
exit "$status"
