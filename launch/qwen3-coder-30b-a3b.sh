#!/usr/bin/env bash
# Qwen3 Coder 30B-A3B, a mixture of experts: 57 GiB of weights.
set -euo pipefail
export MEM_FRACTION_80GB=0.9
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-Qwen/Qwen3-Coder-30B-A3B-Instruct}" "${DRAFTER:-z-lab/Qwen3-Coder-30B-A3B-DFlash}" "$@"
