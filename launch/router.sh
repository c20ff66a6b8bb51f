#!/usr/bin/env bash
# Put SGLang's router (pip install sglang-router) in front of running replicas, port 30000:
#   launch/router.sh URL [URL ...] [any argument of the router]
# Each replica is asked first what it runs: the router itself would mix different models, or
# different releases of sglang_dflash. DRY_RUN=1 prints the command without asking or running.
set -euo pipefail
urls=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
  urls+=("${1%/}")
  shift
done
if [ ${#urls[@]} -eq 0 ]; then
  echo "launch/router.sh: needs the URL of each replica, then any argument of the router." >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
# later arguments win, so each default can be overridden from the command line. The load may differ
# by a few requests only: a replica with more of them verifies fewer drafts of each. The router's own
# default leaves a dead replica in the list for three minutes
args=(
  --worker-urls "${urls[@]}" --port 30000 --policy cache_aware
  --balance-abs-threshold 4 --balance-rel-threshold 1.2
  --worker-startup-check-interval 1 --health-check-interval-secs 5
)
if [ "${DRY_RUN:-0}" = 1 ]; then
  # shell-quoted
  printf '%q ' "$python" -m sglang_router.launch_router "${args[@]}" "$@"
  echo
  exit 0
fi
if ! command -v "$python" >/dev/null; then
  echo "launch/router.sh: no Python at $python. Set PYTHON to the one that has sglang-router." >&2
  exit 1
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/launch/same_replicas.py" "${urls[@]}"
exec "$python" -m sglang_router.launch_router "${args[@]}" "$@"
