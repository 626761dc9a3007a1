#!/usr/bin/env bash
# Builds the base image, bigwave/sandbox-base:latest, when its recipe has
# changed (or with FORCE=1), and prints where its OCI archive lies. With
# CONTAINERD_ADDRESS set it puts the image into that containerd too, into the
# namespace CONTAINERD_NAMESPACE, bigwave if empty.
set -euo pipefail
cd "$(dirname "$0")/.."
name=docker.io/bigwave/sandbox-base:latest

cache=${BIGWAVE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/bigwave}/images
recipe=$(
	{
		uname -m
		find runner/images runner/cmd/image -type f ! -name '*_test.go' ! -name Dockerfile -print0 |
			sort -z | xargs -0 sha256sum
	} | sha256sum | cut -d ' ' -f 1
)
archive=$cache/$recipe.tar

build() {
	scripts/deps.sh mmdebstrap=mmdebstrap /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring \
		$(test "$(id -u)" = 0 || echo newuidmap=uidmap)
	echo 'Building the base image from Debian packages; this takes about a minute.' >&2
	local start=$SECONDS
	tmp=$(mktemp -d "$cache/build.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	runner/images/rootfs.sh "$tmp/rootfs.tar" >&2
	CGO_ENABLED=0 go run -trimpath ./runner/cmd/image "$tmp/rootfs.tar" "$tmp/image.tar" >&2
	mv "$tmp/image.tar" "$archive"
	echo "Built it in $((SECONDS - start)) s: $(du -m "$archive" | cut -f 1) MB" >&2
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once build once
if [[ ! -e $archive || ${FORCE:-} == 1 ]]; then (build); fi
exec 9>&-

if [[ -n ${CONTAINERD_ADDRESS:-} ]]; then
	export CONTAINERD_NAMESPACE=${CONTAINERD_NAMESPACE:-bigwave}
	ctr images import --digests=false "$archive" >/dev/null # what is there already is not unpacked again
	ctr images ls -q "name==$name" | grep -q . || {
		echo "$archive holds no image called $name" >&2
		exit 1
	}
fi
echo "$archive"
