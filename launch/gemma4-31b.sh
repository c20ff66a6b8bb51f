#!/usr/bin/env bash
# Gemma 4 31B: 58 GiB of weights, so an 80 GB card holds short contexts only; 141 GB is comfortable.
set -euo pipefail
export SWA_RATIO=${SWA_RATIO:-0.2} MEM_FRACTION_80GB=0.9
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-google/gemma-4-31B-it}" "${DRAFTER:-z-lab/gemma-4-31B-it-DFlash}" "$@"
