#!/usr/bin/env bash
# Serve with prefill and decode apart, on one machine, behind SGLang's router on port 30000:
#   launch/pd.sh RECIPE [any server argument]
#   TP=2 launch/pd.sh launch/gemma4-31b.sh
# The prefill server takes the first TP GPUs and port 30001, the decode server the next TP and 30002.
# PORT= moves all three, BOOTSTRAP_PORT= (8998) where the servers meet. PREFILL_ARGS=, DECODE_ARGS=
# and ROUTER_ARGS= are further arguments of one of them. If one ends, so do the others. DRY_RUN=1
# prints the three commands. On several machines, start each by itself: docs/several-cards.md.
set -euo pipefail
refuse() {
  echo "launch/pd.sh: $1" >&2
  exit 2
}
if [ $# -eq 0 ] || ! command -v "$1" >/dev/null; then
  refuse "needs a recipe, such as launch/qwen3-8b.sh, then any server argument, and found ${1:-nothing}."
fi
if [ "${DP:-1}" != 1 ] || [ "${NODES:-1}" != 1 ]; then
  refuse "starts one prefill and one decode server, and found DP=${DP:-1} NODES=${NODES:-1}. Start more of them by hand, and launch/router.sh in front."
fi
for number in "TP=${TP:-1}" "PORT=${PORT:-30000}" "BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998}"; do
  case ${number#*=} in
    "" | 0* | *[!0-9]*) refuse "$number is not a number. Pass 1 or more." ;;
  esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
port=${PORT:-30000} meeting=${BOOTSTRAP_PORT:-8998}
prefill_url=http://127.0.0.1:$((port + 1)) decode_url=http://127.0.0.1:$((port + 2))
# unquoted: several words each
read -ra prefill_args <<<"${PREFILL_ARGS:-}"
read -ra decode_args <<<"${DECODE_ARGS:-}"
read -ra router_args <<<"${ROUTER_ARGS:-}"
prefill=(
  "$@" --port $((port + 1)) --disaggregation-mode prefill
  --disaggregation-bootstrap-port "$meeting" "${prefill_args[@]}"
)
decode=(
  "$@" --port $((port + 2)) --disaggregation-mode decode
  --disaggregation-bootstrap-port "$meeting" --base-gpu-id "${TP:-1}" "${decode_args[@]}"
)
router=(
  "$root/launch/router.sh" "prefill=$prefill_url,$meeting" "decode=$decode_url"
  --port "$port" "${router_args[@]}"
)
if [ "${DRY_RUN:-0}" = 1 ]; then
  # shell-quoted
  for command in prefill decode router; do
    declare -n words=$command
    printf '%q ' "${words[@]}"
    echo
  done
  exit 0
fi
names=() pids=()
start() {
  names+=("$1")
  "${@:2}" &
  pids+=($!)
}
end_all() {
  trap - EXIT TERM INT
  kill "${pids[@]}" 2>/dev/null || true
  wait || true
}
trap end_all EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
# end with a sentence if one of them has ended
check() {
  for i in "${!pids[@]}"; do
    if ! kill -0 "${pids[i]}" 2>/dev/null; then
      echo "launch/pd.sh: the ${names[i]} has ended, so the others are stopped, too. Its log says why." >&2
      exit 1
    fi
  done
}
start "prefill server" "${prefill[@]}"
start "decode server" "${decode[@]}"
python=${PYTHON:-python3}
for url in "$prefill_url" "$decode_url"; do
  until "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$url/health" 2>/dev/null; do
    check
    sleep 1
  done
done
start "router" "${router[@]}"
wait -n || true
check
