#!/usr/bin/env bash
# Puts the files of the base image whose archive is $1 into the folder $2.
set -euo pipefail
layer=$(tar -tvf "$1" | sort -n -k 3 | awk 'END { print $NF }')
tar -xOf "$1" "$layer" | tar -xz -C "$2"
