#!/usr/bin/env bash
# The main job, end to end, over HTTP: needs BIGWAVE_URL and
# BIGWAVE_ADMIN_TOKEN of a running Bigwave (make demo starts one).
set -euo pipefail

# The token reaches curl on standard input: an argument would be in ps.
api() { # METHOD PATH [BODY]
	local args=(-fsS --no-buffer -X "$1" "$BIGWAVE_URL$2")
	if (($# > 2)); then args+=(-H 'Content-Type: application/json' -d "$3"); fi
	printf 'header = "Authorization: Bearer %s"\n' "$BIGWAVE_ADMIN_TOKEN" | curl -K - "${args[@]}"
}
say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# field NAME: the first value of that name in the JSON on standard input.
field() {
	grep -oE "\"$1\": *(\"([^\"\\]|\\\\.)*\"|[^,}]*)" | head -n 1 | sed -E 's/^"[^"]*": *//; s/^"(.*)"$/\1/'
}

# run NAME ARGUMENTS: one call, streamed; every event is printed as it comes.
run() {
	local seen=''
	say "$1 $2"
	while IFS= read -r line; do
		case $line in
		event:*) event=${line#event: } ;;
		data:*)
			data=${line#data: }
			case $event in
			run.*) data="$(field id <<<"$data") is $(field status <<<"$data")" ;;
			call.finished)
				seen=$(field status <<<"$data")
				data="$seen, exit code $(field exit_code <<<"$data"), $(field duration_ms <<<"$data") ms, result $(field result <<<"$data")"
				data=${data/, exit code null/} data=${data/, result null/}
				;;
			esac
			printf '%-14s %s\n' "$event" "$data"
			;;
		esac
	done < <(api POST "/v1/agent-sessions/$session/run" \
		"{\"stream\": true, \"tool_calls\": [{\"id\": \"demo\", \"name\": \"$1\", \"arguments\": $2}]}")
	if [[ $seen != ok ]]; then
		echo "$1 ended as \"$seen\", not \"ok\"" >&2
		exit 1
	fi
}

say 'Register grep_repo'
api PUT /admin/workspace-tools/grep_repo '{
  "name": "grep_repo",
  "description": "Search the repo for a regex pattern.",
  "parameters": {
    "type": "object",
    "properties": {
      "pattern": { "type": "string" }
    },
    "required": ["pattern"]
  },
  "handler_kind": "shell_template",
  "handler_payload": {
    "command": "grep -rn {pattern} /workspace"
  }
}'
echo

say 'Set the sandbox policy'
api PUT /admin/sandbox/policy '{
  "workspace_id": "default",
  "fs_allowlist": ["/workspace"],
  "network_allowlist": [],
  "cpu_shares": 1024,
  "memory_mb": 512,
  "pids_limit": 128,
  "wall_clock_seconds": 60,
  "output_bytes_limit": 1048576,
  "base_image": "bigwave/sandbox-base:latest"
}'
echo

say 'Open a session'
session=$(api POST /v1/agent-sessions '{}' | field id)
echo "$session"

run file_write '{"path": "src/main.py", "content": "# TODO: greet in more languages\nprint(\"hello\")\n"}'
run file_write '{"path": "README", "content": "TODO: write this\n"}'
run grep_repo '{"pattern": "TODO"}'
run python_exec '{"code": "import time\nfor i in range(3):\n    print(\"step\", i, flush=True)\n    time.sleep(0.3)"}'
run shell_exec '{"command": "id; uname -n; python3 src/main.py; ls -la"}'
run file_read '{"path": "src/main.py"}'

say 'Close the session'
api DELETE "/v1/agent-sessions/$session"
echo 'done'
