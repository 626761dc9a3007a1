#!/usr/bin/env bash
# Installs the Debian packages that stand behind the named commands, if any is
# missing: deps.sh COMMAND=PACKAGE …
set -euo pipefail

missing=()
for pair in "$@"; do
	command=${pair%%=*} package=${pair#*=}
	if [[ $command == /* ]]; then
		compgen -G "$command" >/dev/null || missing+=("$package")
	else
		command -v "$command" >/dev/null || missing+=("$package")
	fi
done
((${#missing[@]})) || exit 0

if ((EUID != 0)); then
	echo "These Debian packages are missing: ${missing[*]}. Install them as root: apt-get install ${missing[*]}" >&2
	exit 1
fi
if ! command -v apt-get >/dev/null; then
	echo "These packages are missing and there is no apt-get to install them with: ${missing[*]}" >&2
	exit 1
fi
echo "Installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update >&2
apt-get -qq install -y --no-install-recommends "${missing[@]}" >&2
