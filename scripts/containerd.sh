#!/usr/bin/env bash
# Runs a command with a private containerd, which lives in DIR and ends, with
# every container in it, when the command has: containerd.sh DIR COMMAND …
# The command finds it by CONTAINERD_ADDRESS and CONTAINERD_SNAPSHOTTER, as
# ctr does. Nothing else on the machine is touched.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

scripts/deps.sh containerd=containerd runc=runc setsid=util-linux
if ((EUID != 0)); then
	echo 'A private containerd needs root.' >&2
	exit 1
fi
mkdir -p "$1"
dir=$(realpath "$1")
shift
chmod 711 "$dir"

exec 9>"$dir/lock"
flock -n 9 || {
	echo "Another containerd lives in $dir." >&2
	exit 1
}

# A socket's path is at most 107 bytes, and containerd adds to it.
sockets=$dir
if ((${#dir} > 80)); then sockets=$(mktemp -d); fi
export CONTAINERD_ADDRESS=$sockets/containerd.sock

daemon='' keeper='' work=''

# How the command line of the daemon begins.
itself="^containerd -c $dir/config.toml "

# processes PATTERN: the pids whose command line matches.
processes() {
	local cmdline
	for cmdline in /proc/[0-9]*/cmdline; do
		if tr '\0' ' ' 2>/dev/null <"$cmdline" | grep -qE "$1"; then
			basename "$(dirname "$cmdline")"
		fi
	done
}

# remove_containers asks containerd to end what runs in it.
remove_containers() {
	local namespace id
	for namespace in $(timeout 5 ctr namespaces ls -q); do
		for id in $(timeout 5 ctr -n "$namespace" tasks ls -q); do
			timeout 5 ctr -n "$namespace" tasks rm -f "$id" || true
		done
		for id in $(timeout 5 ctr -n "$namespace" containers ls -q); do
			timeout 5 ctr -n "$namespace" containers rm "$id" || true
		done
	done
}

# remove_leftovers ends what containerd could not, because it was killed. A shim
# is the parent of all that its container has, and the container's pid 1 takes
# the rest along.
remove_leftovers() {
	local bundle namespace shim child mount
	for bundle in "$dir"/state/io.containerd.runtime.v2.task/*/*/; do
		if [[ ! -d $bundle ]]; then continue; fi
		namespace=$(basename "$(dirname "$bundle")")
		runc --root "/run/containerd/runc/$namespace" delete --force "$(basename "$bundle")" || true
		if [[ -e ${bundle}address ]]; then rm -f "$(sed 's,^unix://,,' "${bundle}address")"; fi
	done
	for shim in $(processes "^[^ ]*containerd-shim[^ ]* .*-address $CONTAINERD_ADDRESS "); do
		for child in $(cat "/proc/$shim/task/"*/children); do
			kill -KILL "$child" || true
		done
		kill -KILL "$shim" || true
	done
	while read -r mount; do
		umount -l "$mount" || true
	done < <(cut -d ' ' -f 5 /proc/self/mountinfo | grep -F "$dir/" | sort -r)
}

# stop PID: SIGTERM, and SIGKILL after 10 s.
stop() {
	kill -TERM "$1" 2>/dev/null || return 0
	for ((i = 0; i < 100; i++)); do
		kill -0 "$1" 2>/dev/null || return 0
		sleep 0.1
	done
	kill -KILL "$1" 2>/dev/null || true
}

finish() {
	trap '' HUP INT TERM # what follows takes seconds at most
	if [[ -n $work ]]; then
		kill -TERM "$work" 2>/dev/null || true
		wait "$work" 2>/dev/null || true
	fi
	if [[ -n $keeper ]]; then
		kill -KILL "$keeper" 2>/dev/null || true
		wait "$keeper" 2>/dev/null || true
	fi
	if [[ -n $daemon ]]; then
		local running
		running=$(processes "$itself")
		if [[ -n $running ]]; then remove_containers >/dev/null 2>&1 || true; fi
		for daemon in $running; do stop "$daemon"; done
		remove_leftovers >/dev/null 2>&1 || true
	fi
	rm -f "$sockets"/containerd.sock{,.ttrpc}
	if [[ $sockets != "$dir" ]]; then rmdir "$sockets"; fi
}
trap finish EXIT

# overlayfs cannot lie on overlayfs, as in a container without a volume.
CONTAINERD_SNAPSHOTTER=native
mkdir -p "$dir/probe"/{lower,upper,work,merged}
if mount -t overlay -o "lowerdir=$dir/probe/lower,upperdir=$dir/probe/upper,workdir=$dir/probe/work" none "$dir/probe/merged" 2>/dev/null; then
	umount "$dir/probe/merged"
	CONTAINERD_SNAPSHOTTER=overlayfs
fi
rm -rf "$dir/probe"
export CONTAINERD_SNAPSHOTTER

cat >"$dir/config.toml" <<TEXT
version = 2
root = "$dir/root"
state = "$dir/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri",
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.restart",
  "io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]
[grpc]
  address = "$CONTAINERD_ADDRESS"
[debug]
  level = "warn"
TEXT

# One that outlived a script that was killed; its containers live on.
for orphan in $(processes "$itself"); do stop "$orphan"; done

# Of its own process group, as the command, so that Ctrl-C reaches this script
# alone, which passes it on once.
start() {
	setsid containerd -c "$dir/config.toml" >>"$dir/containerd.log" 2>&1 9>&- &
	daemon=$!
}

# keep starts containerd again when it ended, as a machine's init would, for as
# long as this script lives.
keep() {
	while sleep 0.5 && kill -0 $$ 2>/dev/null; do
		if ! kill -0 "$daemon" 2>/dev/null; then
			echo "containerd ended and is started again; its log is $dir/containerd.log." >&2
			start
		fi
	done
}

start
trap 'exit 143' HUP INT TERM
for ((i = 0; ; i++)); do
	if timeout 5 ctr version >/dev/null 2>&1; then break; fi
	if ! kill -0 "$daemon" 2>/dev/null || ((i == 100)); then
		echo "containerd did not start; the end of its log ($dir/containerd.log):" >&2
		tail -n 15 "$dir/containerd.log" >&2
		exit 1
	fi
	sleep 0.1
done

keep 9>&- &
keeper=$!
trap 'kill -TERM "$work" 2>/dev/null || true' HUP INT TERM
setsid "$@" 9>&- &
work=$!
status=0
wait "$work" || status=$?
# A signal ends the wait, not the command.
while kill -0 "$work" 2>/dev/null; do
	status=0
	wait "$work" || status=$?
done
exit "$status"
