#!/usr/bin/env bash
# Builds the root file system of bigwave/sandbox-base from Debian 13 packages:
# rootfs.sh OUT.tar. The same packages give the same bytes.
#
# The packages come from the mirror that this host's apt uses, through its
# proxy, and from deb.debian.org where it names none; DEBIAN_MIRROR and
# DEBIAN_SECURITY_MIRROR say otherwise.
set -euo pipefail
out=$1
recipe=$(cd "$(dirname "$0")" && pwd)

export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1754697600} # the day of Debian 13
export LC_ALL=C.UTF-8 TZ=UTC
umask 022

# source_of PATTERN DEFAULT: the first address of that shape among apt's sources.
source_of() {
	{ apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null || true; } |
		{ grep -m1 -E "$1" || echo "$2"; }
}
mirror=${DEBIAN_MIRROR:-$(source_of '/debian/?$' http://deb.debian.org/debian)}
security=${DEBIAN_SECURITY_MIRROR:-$(source_of '/debian-security/?$' http://deb.debian.org/debian-security)}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

aptopts=('APT::Install-Recommends "false"')
while read -r option; do
	aptopts+=("${option%;}")
done < <(apt-config dump | grep -iE '^Acquire::((https?::)?Proxy|https?::Proxy::[^ ]+|Check-Valid-Until) "[^"]+";' || true)

packages=$(sed 's/#.*//' "$recipe/packages.txt" | xargs | tr ' ' ,)

mmdebstrap --quiet --format=tar --variant=apt --include="$packages" \
	"${aptopts[@]/#/--aptopt=}" \
	--dpkgopt=force-unsafe-io \
	--dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt='path-exclude=/usr/share/info/*' \
	--dpkgopt='path-exclude=/usr/share/doc/*' \
	--dpkgopt='path-include=/usr/share/doc/*/copyright' \
	--dpkgopt='path-exclude=/usr/share/locale/*' \
	--dpkgopt='path-exclude=/usr/share/lintian/*' \
	--customize-hook="$recipe/customize.sh" \
	trixie "$out" \
	"deb [signed-by=$keyring] $mirror trixie main" \
	"deb [signed-by=$keyring] $mirror trixie-updates main" \
	"deb [signed-by=$keyring] $security trixie-security main"
