#!/usr/bin/env bash
# Qwen3 8B: 15 GiB of weights.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-Qwen/Qwen3-8B}" "${DRAFTER:-z-lab/Qwen3-8B-DFlash-b16}" "$@"
