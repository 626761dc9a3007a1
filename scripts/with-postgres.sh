#!/usr/bin/env bash
# Runs a command with a PostgreSQL server of its own on a free port, ended when
# the command has: BIGWAVE_TEST_POSTGRES_URL says where it is.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=/usr/lib/postgresql
scripts/deps.sh setpriv=util-linux "$bin/*/bin/initdb=postgresql"

bin=$(printf '%s\n' "$bin"/*/bin | sort -V | tail -n 1)
data=$(mktemp -d)
port=$(scripts/free-port.sh)
as=() # PostgreSQL refuses to run as root
if ((EUID == 0)); then
	chmod 711 "$data"
	mkdir "$data/pg"
	chown postgres "$data/pg"
	as=(setpriv --reuid=postgres --regid=postgres --clear-groups)
else
	mkdir "$data/pg"
fi
finish() {
	"${as[@]}" "$bin/pg_ctl" -D "$data/pg/db" -m immediate stop >/dev/null 2>&1 || true
	rm -rf "$data"
}
trap finish EXIT
trap 'exit 143' INT TERM
(
	cd /
	"${as[@]}" "$bin/initdb" -D "$data/pg/db" -U bigwave -A trust -E UTF8 --locale=C.UTF-8 >/dev/null
	"${as[@]}" "$bin/pg_ctl" -D "$data/pg/db" -w -l "$data/pg/log" \
		-o "-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=200" start >/dev/null
) || {
	echo 'PostgreSQL did not start' >&2
	cat "$data/pg/log" >&2 || true
	exit 1
}
export BIGWAVE_TEST_POSTGRES_URL="postgres://bigwave@127.0.0.1:$port/postgres?sslmode=disable"

status=0
"$@" || status=$?
exit "$status"
