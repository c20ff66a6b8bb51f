#!/usr/bin/env bash
# Put SGLang's router (pip install sglang-router) in front of running replicas, port 30000:
#   launch/router.sh URL [URL ...] [any argument of the router]
# or in front of servers that prefill and servers that decode, at least one of each:
#   launch/router.sh prefill=URL[,BOOTSTRAP_PORT] decode=URL [any argument of the router]
# Each server is asked first what it runs: the router itself would mix different models, or
# different releases of sglang_dflash. DRY_RUN=1 prints the command without asking or running.
set -euo pipefail
refuse() {
  echo "launch/router.sh: $1" >&2
  exit 2
}
urls=() prefill=() decode=() named=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
  named+=("$1")
  case $1 in
    prefill=*)
      url=${1#prefill=} port=8998
      case $url in *,*) port=${url##*,} url=${url%,*} ;; esac
      prefill+=(--prefill "${url%/}" "$port")
      ;;
    decode=*)
      url=${1#decode=}
      decode+=(--decode "${url%/}")
      ;;
    *) urls+=("${1%/}") ;;
  esac
  shift
done
if [ ${#named[@]} -eq 0 ]; then
  refuse "needs the URL of each replica, then any argument of the router."
fi
if [ ${#urls[@]} -gt 0 ]; then
  workers=(--worker-urls "${urls[@]}")
else
  workers=(--pd-disaggregation "${prefill[@]}" "${decode[@]}")
fi
if [ ${#urls[@]} -gt 0 ] && [ $((${#prefill[@]} + ${#decode[@]})) -gt 0 ]; then
  refuse "${urls[0]} is named without prefill= or decode=, but other servers are named with it. Name all of them so, or none."
fi
if [ ${#urls[@]} -eq 0 ] && { [ ${#prefill[@]} -eq 0 ] || [ ${#decode[@]} -eq 0 ]; }; then
  refuse "needs servers that prefill (prefill=URL) and servers that decode (decode=URL), and found one kind."
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
# later arguments win, so each default can be overridden from the command line. The load may differ
# by a few requests only: a replica with more of them verifies fewer drafts of each. The router's own
# default leaves a dead replica in the list for three minutes
args=(
  "${workers[@]}" --port 30000 --policy cache_aware
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
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/launch/same_replicas.py" "${named[@]}"
exec "$python" -m sglang_router.launch_router "${args[@]}" "$@"
