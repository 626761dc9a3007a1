#!/usr/bin/env bash
# Prints a TCP port of 127.0.0.1 that nobody listens on.
set -euo pipefail
while :; do
	port=$((20000 + RANDOM % 12000))
	if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
		echo "$port"
		exit
	fi
done
