#!/usr/bin/env bash
# Runs every test against real services, which it starts itself.
# TESTFLAGS is passed to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/deps.sh python3=python3 curl=curl ps=procps git=git mke2fs=e2fsprogs ip=iproute2 linux.uml=user-mode-linux /usr/sbin/insmod=kmod
go vet work
export BIGWAVE_TEST_UML=1 # cgroup v2 under User-mode Linux, where this host has v1
# shellcheck disable=SC2086
test=(scripts/with-postgres.sh go test -p 2 -timeout 20m ${TESTFLAGS:-} work)
if ((EUID != 0)); then
	exec "${test[@]}"
fi

# The containerd backend's own tests start one each; those of the daemons share
# one. What runs Python tools is tested with the base image's Python.
BIGWAVE_TEST_IMAGE=$(scripts/image.sh)
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
scripts/image-root.sh "$BIGWAVE_TEST_IMAGE" "$root"
export BIGWAVE_TEST_IMAGE BIGWAVE_TEST_PYTHON="chroot $root python3"
# shellcheck disable=SC2016
scripts/with-containerd.sh bash -c '
	CONTAINERD_NAMESPACE=bigwave scripts/image.sh >/dev/null
	exec "$@"' bash "${test[@]}"
