#!/usr/bin/env bash
# Makes a bare Debian the image: customize.sh ROOT, called by rootfs.sh when
# the packages are installed.
set -euo pipefail
root=$1

# Bytecode that is valid whatever the time stamps say: the root of a sandbox is
# read-only, so Python could not write it there.
find "$root"/usr/lib/python3* -name __pycache__ -prune -exec rm -rf {} +
PYTHONHASHSEED=0 chroot "$root" sh -c \
	'exec python3 -m compileall -q -j1 --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.*'

# Nothing of the host: its mirror, its proxy, its names.
rm -f "$root"/etc/apt/apt.conf.d/99mmdebstrap "$root"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$root"/etc/apt/sources.list.d/*
cat >"$root/etc/apt/sources.list" <<'TEXT'
deb http://deb.debian.org/debian trixie main
deb http://deb.debian.org/debian trixie-updates main
deb http://deb.debian.org/debian-security trixie-security main
TEXT
rm -f "$root"/etc/{hostname,hosts,resolv.conf} # with their modes
echo sandbox >"$root/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"

find "$root/var/log" "$root/var/cache" -type f -delete
find "$root/var/lib/apt/lists" -mindepth 1 -delete

install -d -m 755 "$root/workspace"
install -d -m 1777 "$root/tmp"
