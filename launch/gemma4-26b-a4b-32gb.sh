#!/usr/bin/env bash
# Gemma 4 26B-A4B with its experts in NVFP4, for a Blackwell card of 32 GB such as an RTX 5090:
# 17.5 GiB of weights. Planned for that card, not run on it yet.
set -euo pipefail
export SWA_RATIO=${SWA_RATIO:-0.15} MEM_FRACTION=${MEM_FRACTION:-0.9}
quantization=(--quantization modelopt_fp4)
if [ -n "${TARGET:-}" ]; then
  # another checkpoint says itself how it is quantised
  quantization=()
fi
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-nvidia/Gemma-4-26B-A4B-NVFP4}" "${DRAFTER:-z-lab/gemma-4-26B-A4B-it-DFlash}" \
  --max-running-requests 4 --chunked-prefill-size 2048 --context-length 147456 \
  "${quantization[@]}" "$@"
