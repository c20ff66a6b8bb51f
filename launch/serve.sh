#!/usr/bin/env bash
# Serve a target with its DFlash drafter on a GPU, port 30000:
#   launch/serve.sh TARGET DRAFTER [any server argument]
# Each is a Hugging Face name or a local folder. PLAIN=1 serves the target without speculation, and
# SGLANG_DFLASH=off with SGLang's own DFLASH, both on the attention backends that SGLang picks;
# DRY_RUN=1 prints the command without running it. The block size is the drafter's own unless you
# pass --speculative-num-draft-tokens. The pair is checked before anything is loaded, memory included:
# MEM_FRACTION is the fraction of GPU memory for weights and KV, SWA_RATIO the size of the
# sliding-window pool in tokens, as a fraction of the full-attention pool. The drafter's attention
# backend is chosen by the card unless you pass --speculative-draft-attention-backend.
# On several GPUs: TP= divides the model among them, DP= runs replicas of it, each on TP GPUs. On
# several machines: NODES= and MASTER=host:port, the same on each, and NODE_RANK=, from 0, different
# on each.
set -euo pipefail
refuse() {
  echo "launch/serve.sh: $1" >&2
  exit 2
}
if [ $# -lt 2 ]; then
  refuse "needs TARGET and DRAFTER, then any server argument."
fi
target=$1 drafter=$2
shift 2
tp=${TP:-1} dp=${DP:-1} nodes=${NODES:-1}
for count in "TP=$tp" "DP=$dp" "NODES=$nodes"; do
  case ${count#*=} in
    "" | 0* | *[!0-9]*) refuse "$count is not a number of GPUs or machines. Pass 1 or more." ;;
  esac
done
cards=()
if [ "$tp" != 1 ]; then cards+=(--tp-size "$tp"); fi
if [ "$dp" != 1 ]; then cards+=(--dp-size "$dp"); fi
if [ "$nodes" != 1 ]; then
  if [ "$dp" != 1 ]; then
    refuse "DP=$dp with NODES=$nodes: SGLang runs replicas on one machine only. Start a server on each and launch/router.sh in front."
  fi
  if [ $((tp % nodes)) != 0 ]; then
    refuse "TP=$tp is not a multiple of NODES=$nodes. Each machine takes the same number of GPUs."
  fi
  if [ -z "${MASTER:-}" ] || [ "${MASTER%:*}" = "$MASTER" ]; then
    refuse "NODES=$nodes needs MASTER=host:port, the same on each machine, and found MASTER=${MASTER:-}. Name a free port of the machine with NODE_RANK=0."
  fi
  case ${NODE_RANK:-} in
    "" | *[!0-9]*) rank=$nodes ;;
    *) rank=$NODE_RANK ;;
  esac
  if [ "$rank" -ge "$nodes" ]; then
    refuse "NODES=$nodes needs NODE_RANK=0 to $((nodes - 1)), a different one on each machine, but found NODE_RANK=${NODE_RANK:-}."
  fi
  cards+=(--nnodes "$nodes" --node-rank "$rank" --dist-init-addr "$MASTER")
fi
python=${PYTHON:-python3}
# by GPU memory, 80 GB or 141 GB; a recipe may set its own fraction
card=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1 || true)
if [ "${card:-0}" -ge 100000 ]; then
  fraction=${MEM_FRACTION:-${MEM_FRACTION_141GB:-0.85}}
else
  fraction=${MEM_FRACTION:-${MEM_FRACTION_80GB:-0.85}}
fi
memory=(--mem-fraction-static "$fraction" --swa-full-tokens-ratio "${SWA_RATIO:-0.8}")
# later arguments win, so each default can be overridden from the command line
args=(
  --model-path "$target" "${memory[@]}" "${cards[@]}" --port 30000
)
module=(sglang.launch_server)
if [ "${PLAIN:-0}" != 1 ]; then
  args+=(--speculative-algorithm DFLASH --speculative-draft-model-path "$drafter")
  if [ "${SGLANG_DFLASH:-on}" != off ]; then
    args+=(--attention-backend triton)
  fi
  # the same server, after a check of the pair
  module=(sglang_dflash serve)
fi
if [ "${DRY_RUN:-0}" = 1 ]; then
  # shell-quoted
  printf '%q ' "$python" -m "${module[@]}" "${args[@]}" "$@"
  echo
  exit 0
fi
if ! command -v "$python" >/dev/null; then
  echo "launch/serve.sh: no Python at $python. Set PYTHON to the one that has SGLang." >&2
  exit 1
fi
"$python" "$(dirname "${BASH_SOURCE[0]}")/has_sglang.py"
# FA4 compiles its kernels at every start, for half a minute, unless its disk cache is enabled
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
exec "$python" -m "${module[@]}" "${args[@]}" "$@"
