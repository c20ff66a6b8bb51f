#!/usr/bin/env bash
# Serve a target with its DFlash drafter on a GPU, port 30000:
#   launch/serve.sh TARGET DRAFTER [any server argument]
# Each is a Hugging Face name or a local folder. PLAIN=1 serves the target without speculation;
# DRY_RUN=1 prints the command and does not run it. The block size is the drafter's own unless you
# pass --speculative-num-draft-tokens. The pair is checked before anything is loaded.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "launch/serve.sh: needs TARGET and DRAFTER, then any server argument." >&2
  exit 2
fi
target=$1 drafter=$2
shift 2
python=${PYTHON:-python3}
# later arguments win, so each default can be overridden from the command line
args=(
  --model-path "$target" --attention-backend triton --trust-remote-code
  --mem-fraction-static "${MEM_FRACTION:-0.85}" --port 30000
)
if [ "${PLAIN:-0}" != 1 ]; then
  args+=(
    --speculative-algorithm DFLASH --speculative-draft-model-path "$drafter"
    --speculative-draft-attention-backend "${DRAFT_BACKEND:-fa4}"
  )
  if ! findings=$("$python" -m sglang_dflash doctor --trust-remote-code --model-path "$target" \
    --speculative-draft-model-path "$drafter" --mem-fraction-static "${MEM_FRACTION:-0.85}"); then
    echo "$findings" | grep -A1 '^bad' >&2 || true
    exit 1
  fi
fi
if [ "${DRY_RUN:-0}" = 1 ]; then
  echo "$python -m sglang.launch_server ${args[*]} $*"
  exit 0
fi
exec "$python" -m sglang.launch_server "${args[@]}" "$@"
