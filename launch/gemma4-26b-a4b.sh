#!/usr/bin/env bash
# Gemma 4 26B-A4B, a mixture of experts: 48 GiB of weights, fits an 80 GB card.
set -euo pipefail
export SWA_RATIO=${SWA_RATIO:-0.2}
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-google/gemma-4-26B-A4B-it}" "${DRAFTER:-z-lab/gemma-4-26B-A4B-it-DFlash}" "$@"
