#!/usr/bin/env bash
# Llama 3.1 8B (gated: accept its licence and set HF_TOKEN): 15 GiB of weights.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" \
  "${TARGET:-meta-llama/Llama-3.1-8B-Instruct}" "${DRAFTER:-z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat}" "$@"
