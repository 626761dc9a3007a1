#!/usr/bin/env bash
# Starts the control plane and one runner, prints where they are, and stays
# until SIGTERM or Ctrl-C, or until one of the two ends. With a command as
# arguments it runs that command instead of staying.
set -euo pipefail
cd "$(dirname "$0")/.."

export BIGWAVE_LISTEN=${BIGWAVE_LISTEN:-127.0.0.1:8000}
export BIGWAVE_DATA_DIR=${BIGWAVE_DATA_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/bigwave}
export BIGWAVE_URL=http://$BIGWAVE_LISTEN
log=$BIGWAVE_DATA_DIR/log
mkdir -p "$log"
chmod 700 "$BIGWAVE_DATA_DIR"

# With BACKEND=containerd sandboxes are containers in the containerd that
# BIGWAVE_CONTAINERD_ADDRESS names, or else in one of our own around all this.
case ${BACKEND:=subprocess} in
subprocess) ;;
containerd)
	export BIGWAVE_BACKEND=containerd
	if [[ -z ${BIGWAVE_CONTAINERD_ADDRESS:-} ]]; then
		env -u CONTAINERD_ADDRESS scripts/image.sh >/dev/null
		# shellcheck disable=SC2016
		exec scripts/containerd.sh "$BIGWAVE_DATA_DIR/containerd" bash -c '
			export BIGWAVE_CONTAINERD_ADDRESS=$CONTAINERD_ADDRESS
			export BIGWAVE_CONTAINERD_SNAPSHOTTER=$CONTAINERD_SNAPSHOTTER
			exec scripts/up.sh "$@"' bash "$@"
	fi
	CONTAINERD_ADDRESS=$BIGWAVE_CONTAINERD_ADDRESS \
		CONTAINERD_NAMESPACE=${BIGWAVE_CONTAINERD_NAMESPACE:-} \
		CONTAINERD_SNAPSHOTTER=${BIGWAVE_CONTAINERD_SNAPSHOTTER:-overlayfs} \
		scripts/image.sh >/dev/null
	;;
*)
	echo "BACKEND is \"$BACKEND\"; it may be subprocess or containerd." >&2
	exit 1
	;;
esac

controlplane='' runner='' work=''
# finish ends what was started, the runner first: its last reports need the
# control plane. A second signal ends open calls at once.
finish() {
	trap 'kill -TERM $runner 2>/dev/null || true' INT TERM
	if [[ -n $runner ]]; then echo "Stopping; open calls have up to ${BIGWAVE_GRACE:-30s}, a second Ctrl-C ends them." >&2; fi
	for pid in $work $runner $controlplane; do
		kill -TERM "$pid" 2>/dev/null || true
		while kill -0 "$pid" 2>/dev/null; do wait "$pid" 2>/dev/null || true; done
	done
}
trap finish EXIT
trap 'exit 0' INT TERM

fail() {
	echo "$1; the end of its log ($2):" >&2
	tail -n 15 "$2" >&2
	exit 1
}

if (exec 3<>"/dev/tcp/${BIGWAVE_LISTEN%:*}/${BIGWAVE_LISTEN##*:}") 2>/dev/null; then
	echo "Something else listens on $BIGWAVE_LISTEN already; set BIGWAVE_LISTEN to another address." >&2
	exit 1
fi

# Of their own process groups, so that Ctrl-C reaches this script alone.
setsid bin/bigwave-controlplane >>"$log/controlplane.log" 2>&1 &
controlplane=$!
for ((i = 0; ; i++)); do
	kill -0 "$controlplane" 2>/dev/null || fail "The control plane did not start" "$log/controlplane.log"
	if curl -fs -o /dev/null "$BIGWAVE_URL/readyz"; then break; fi
	((i < 300)) || fail "The control plane is not ready after 30 s" "$log/controlplane.log"
	sleep 0.1
done
if [[ -z ${BIGWAVE_ADMIN_TOKEN:-} ]]; then
	BIGWAVE_ADMIN_TOKEN=$(<"$BIGWAVE_DATA_DIR/admin-token")
	export BIGWAVE_ADMIN_TOKEN
fi

env -u BIGWAVE_ADMIN_TOKEN setsid bin/bigwave-runner >>"$log/runner.log" 2>&1 &
runner=$!
# The token reaches curl on standard input: an argument would be in ps.
auth() { printf 'header = "Authorization: Bearer %s"\n' "$BIGWAVE_ADMIN_TOKEN" | curl -fsS -K - "$@"; }
for ((i = 0; ; i++)); do
	auth "$BIGWAVE_URL/admin/runners" 2>/dev/null | grep -q '"state": *"ready"' && break
	kill -0 "$runner" 2>/dev/null || fail "The runner did not start" "$log/runner.log"
	((i < 300)) || fail "The runner is not ready after 30 s" "$log/runner.log"
	sleep 0.1
done

if (($#)); then
	"$@" &
	work=$!
	status=0
	wait "$work" || status=$?
	work=''
	exit "$status"
fi

cat <<TEXT
Bigwave is up.
  URL          $BIGWAVE_URL
  admin token  $BIGWAVE_ADMIN_TOKEN
  data         $BIGWAVE_DATA_DIR
  logs         $log
Ctrl-C stops it.
TEXT
wait -n "$controlplane" "$runner" || true
kill -0 "$controlplane" 2>/dev/null || fail "The control plane ended" "$log/controlplane.log"
kill -0 "$runner" 2>/dev/null || fail "The runner ended" "$log/runner.log"
