#!/usr/bin/env bash
# Gemma 4 31B with 4-bit weights and FP8 KV, for a card of 32 GB with compute capability 8.9 or
# later, such as an RTX 5090: 21.7 GiB of weights. Planned for that card, not run on it yet.
set -euo pipefail
export SWA_RATIO=${SWA_RATIO:-0.15} MEM_FRACTION=${MEM_FRACTION:-0.9}
target=${TARGET:-google/gemma-4-31B-it-qat-w4a16-ct}
if [ -z "${TARGET:-}" ] && [ "${DRY_RUN:-0}" != 1 ]; then
  # SGLang cannot load this checkpoint as it is: sglang_dflash/commands/plain_towers.py
  target=$("${PYTHON:-python3}" -m sglang_dflash plain-towers "$target")
fi
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "$target" "${DRAFTER:-z-lab/gemma-4-31B-it-DFlash}" \
  --max-running-requests 4 --chunked-prefill-size 2048 --context-length 32768 \
  --kv-cache-dtype fp8_e4m3 "$@"
