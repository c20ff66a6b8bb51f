#!/usr/bin/env bash
# What launch/cpu.sh is to the tests without a GPU: the embedded pair, exact enough to compare
# tokens: fp32, no tensor-core rounding, SGLang's layers in plain torch; graphs and overlap as
# usual. The pool is small, so many such servers share a card.
#   tests/gpu.sh [any server argument]; PLAIN=1 leaves speculation out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=$root/sglang_dflash
export NATIVE_OPS=${NATIVE_OPS:-1} TRITON_F32_DEFAULT=${TRITON_F32_DEFAULT:-ieee}
# no compiling while requests wait: what SGLang compiles of its sampler takes minutes in many servers
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
# the tests' chunks; by more, SGLang's deterministic mode never begins a prompt longer than a chunk
export SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE=${SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE:-64}
# what linear attention keeps of an fp32 target's inputs, which SGLang would round to bf16
export SGLANG_MAMBA_CONV_DTYPE=${SGLANG_MAMBA_CONV_DTYPE:-float32}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
export PYTHONPATH=$root/tests/plugins${PYTHONPATH:+:$PYTHONPATH}
# later arguments win
args=(
  --model-path "$package/pairs/tiny/target"
  --attention-backend triton --dtype float32 --mem-fraction-static 0.5
  --cuda-graph-max-bs-decode 8 --disable-prefill-cuda-graph --skip-server-warmup --sleep-on-idle
  --max-total-tokens 16384 --max-running-requests 16
  --host 127.0.0.1 --port 30000
)
if [ "${PLAIN:-0}" != 1 ]; then
  args+=(--speculative-algorithm DFLASH --speculative-draft-model-path "$package/pairs/tiny/drafter")
  args+=(--speculative-draft-attention-backend triton)
else
  # with overlap, SGLang's own penalties lag one token behind
  args+=(--disable-overlap-schedule)
fi
exec "${PYTHON:-python3}" -m sglang.launch_server "${args[@]}" "$@"
