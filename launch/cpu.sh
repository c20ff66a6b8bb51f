#!/usr/bin/env bash
# Serve on a CPU, DFLASH on, with the embedded pair unless you name another:
#   launch/cpu.sh [any server argument]
# PLAIN=1 launch/cpu.sh serves the same target without speculation.
# OVERLAP=1 keeps DFLASH's overlap scheduling on, for tests: on a CPU it gains nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "launch/cpu.sh: no Python at $python. Run 'make venv' first, or set PYTHON." >&2
  exit 1
fi
"$python" "$root/launch/has_sglang.py"
package=$root/sglang_dflash
pairs=${SGLANG_DFLASH_PAIRS:-$package/pairs}
# SGLang's own CPU switch; it also enables our fallbacks for what SGLang lacks on a CPU
export SGLANG_USE_CPU_ENGINE=1
export PYTHONPATH=$package/glue/cpu/path${PYTHONPATH:+:$PYTHONPATH}
# what linear attention keeps of an fp32 target's inputs, which SGLang would round to bf16
export SGLANG_MAMBA_CONV_DTYPE=${SGLANG_MAMBA_CONV_DTYPE:-float32}
# later arguments win, so each default can be overridden from the command line
args=(
  --model-path "$pairs/tiny/target"
  --device cpu --attention-backend torch_native --dtype float32
  --disable-cuda-graph --skip-server-warmup --sleep-on-idle
  --max-total-tokens 16384 --max-running-requests 16
  --host 127.0.0.1 --port 30000
)
if [ "${PLAIN:-0}" = 1 ] || [ "${OVERLAP:-0}" != 1 ]; then
  args+=(--disable-overlap-schedule)
fi
if [ "${PLAIN:-0}" != 1 ]; then
  args+=(--speculative-algorithm DFLASH --speculative-draft-model-path "$pairs/tiny/drafter")
fi
exec "$python" -m sglang.launch_server "${args[@]}" "$@"
