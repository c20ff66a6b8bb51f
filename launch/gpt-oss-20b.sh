#!/usr/bin/env bash
# gpt-oss 20B, a mixture of MXFP4 experts: 13 GiB of weights. Half of its layers see 128 tokens.
set -euo pipefail
export SWA_RATIO=${SWA_RATIO:-0.2}
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-openai/gpt-oss-20b}" "${DRAFTER:-z-lab/gpt-oss-20b-DFlash}" "$@"
