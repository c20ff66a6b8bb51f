#!/usr/bin/env bash
# Qwen3 4B: 8 GiB of weights.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-Qwen/Qwen3-4B}" "${DRAFTER:-z-lab/Qwen3-4B-DFlash-b16}" "$@"
