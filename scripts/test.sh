#!/usr/bin/env bash
# Runs every test against real services, which it starts itself.
# TESTFLAGS is passed to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/deps.sh python3=python3 curl=curl ps=procps git=git mke2fs=e2fsprogs ip=iproute2 linux.uml=user-mode-linux
if ((EUID == 0)); then
	scripts/deps.sh containerd=containerd runc=runc
	BIGWAVE_TEST_IMAGE=$(scripts/image.sh) # the base image, for the containerd backend
	export BIGWAVE_TEST_IMAGE
fi
go vet work
export BIGWAVE_TEST_UML=1 # cgroup v2 under User-mode Linux, where this host has v1
# shellcheck disable=SC2086
exec scripts/with-postgres.sh go test -p 2 -timeout 20m ${TESTFLAGS:-} work
