#!/usr/bin/env bash
# Submit examples/job.py with `ray job submit` to a head that this script starts, and ends again.
#
#   examples/submit_job.sh token    the head wants Ray's auth token, made here in a private home
#   examples/submit_job.sh open     no authentication (the default)
#
#   PYTHON   interpreter whose environment has Ray and raykv (default: .venv/bin/python, see `make setup`)
#
# Against a cluster that runs already only the last command is needed, with its address and, if it wants
# one, its token in ~/.ray/auth_token or RAY_AUTH_TOKEN.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-open}
case $mode in
token) export RAY_AUTH_MODE=token ;;
open) export RAY_AUTH_MODE=disabled ;;
*)
    echo "usage: $0 [token|open]" >&2
    exit 2
    ;;
esac
python=$(command -v "${PYTHON:-.venv/bin/python}") || {
    echo "error: no ${PYTHON:-.venv/bin/python}; run make setup, or name an interpreter in PYTHON" >&2
    exit 2
}
PATH=$(cd "$(dirname "$python")" && pwd):$PATH
export PATH

# Short, because Ray's sockets lie deep below and a socket's path ends at 107 bytes.
world=$(mktemp -d /tmp/rkXXXXXX)
head=
export HOME=$world/home RAY_TMPDIR=$world RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS RAY_NAMESPACE RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH
mkdir "$HOME"

# Ends only what was started here: `ray start --block` takes its own processes with it when told to end.
clean_up() {
    trap '' INT TERM
    if [ -n "$head" ]; then
        kill -TERM "$head" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 "$head" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL -- "-$head" 2>/dev/null || true # timeout made a process group of its own
        wait "$head" 2>/dev/null || true
    fi
    rm -rf "$world"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ "$mode" = token ]; then
    timeout 60 ray get-auth-token --generate >/dev/null
    echo "made a token in a home of its own"
fi

# Free ports, so that this head meets no other one.
read -r port dashboard client_port agent_port < <("$python" -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(s.getsockname()[1] for s in sockets))')

# Nobody else uses this head, so it need not be drained for 30 s before it ends.
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 timeout -k 10 300 ray start --head --block --node-ip-address 127.0.0.1 --port "$port" \
    --include-dashboard true --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" \
    --dashboard-agent-listen-port "$agent_port" --ray-client-server-port "$client_port" \
    --min-worker-port 0 --max-worker-port 0 --num-cpus 2 --object-store-memory 83886080 \
    --temp-dir "$world/ray" --disable-usage-stats >"$world/head.log" 2>&1 &
head=$!

url=http://127.0.0.1:$dashboard
echo "waiting for a head at $url"
# Asks without a token: an open head answers 200, one that wants a token refuses with 401.
answer=$(timeout 90 "$python" - "$url/api/jobs/" "$head" <<'PYTHON'
import os, sys, time, urllib.error, urllib.request
while True:
    os.kill(int(sys.argv[2]), 0)
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=5).status)
        break
    except urllib.error.HTTPError as error:
        print(error.code)
        break
    except OSError:
        time.sleep(0.3)
PYTHON
) || {
    echo "error: the head did not come up" >&2
    cat "$world/head.log" >&2
    exit 1
}
echo "asked without a token it answers $answer"

timeout 150 ray job submit --address "$url" --working-dir examples -- python job.py
