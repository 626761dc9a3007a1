#!/usr/bin/env bash
# Runs the walk-through on daemons of its own: a free port, a fresh data
# folder, all stopped and removed at the end.
set -euo pipefail
cd "$(dirname "$0")"

data=$(mktemp -d)
trap 'rm -rf --one-file-system "$data"' EXIT
trap 'exit 143' INT TERM
export BIGWAVE_DATA_DIR=$data
export BIGWAVE_LISTEN=127.0.0.1:$(./free-port.sh)
unset BIGWAVE_ADMIN_TOKEN BIGWAVE_DATABASE_URL BIGWAVE_NATS_URL BIGWAVE_CONTAINERD_ADDRESS

./up.sh scripts/demo.sh &
up=$!
finish() {
	kill -TERM "$up" 2>/dev/null || true
	wait "$up" || true
	rm -rf --one-file-system "$data"
}
trap finish EXIT
wait "$up"
