#!/usr/bin/env bash
# Qwen3 8B with 4-bit weights, for a card of 24 GB such as an RTX 3090 or 4090: 5.7 GiB of weights.
# Planned for that card, not run on it yet.
set -euo pipefail
export MEM_FRACTION=${MEM_FRACTION:-0.88}
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-Qwen/Qwen3-8B-AWQ}" "${DRAFTER:-z-lab/Qwen3-8B-DFlash-b16}" \
  --max-running-requests 4 --chunked-prefill-size 2048 --context-length 40960 "$@"
