#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The bench on a CUDA device, within eight minutes: fp32 input, and products with half-precision operands.
#
#   bash benchmarks/gpu.sh [FOLDER]           results in FOLDER, else $OUT, else matroots-bench-gpu
#   bash benchmarks/gpu.sh --test [FOLDER]    the same script on the CPU with tiny matrices: does it work at all?
#
# Needs an environment where torch sees the device and numpy and scipy are installed ($PYTHON, default python3). Takes
# pytorch-optimizer along if it is there. Every finished cell is on disk, so what is cut short keeps its results.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

python="${PYTHON:-python3}"
device=cuda
grid=(--n 64 128 256 512 1024 2048 --conditions 1e4 1e6 --megabytes 64 --budget 5 --limit 400 --members 4)
if [ "${1:-}" = --test ]; then
    shift
    device=cpu
    grid=(--n 16 32 --conditions 1e2 --megabytes 0.02 --budget 0.1 --limit 60 --members 4 --threads 1)
fi
out="${1:-${OUT:-matroots-bench-gpu}}"

if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "benchmarks/gpu.sh: torch sees no CUDA device: nothing was run (--test runs the script on the CPU)" >&2
    exit 3
fi

status=0
timeout --signal=INT --kill-after=15 460 "$python" -m matroots bench --plain --device "$device" --dtypes float32 --p 2 4 \
    --matmul-dtypes bfloat16 float16 "${grid[@]}" --out "$out" || status=$?
# 124, 130, 137: ended by timeout. What was finished before is kept, and is a result
if [ "$status" -ne 0 ] && [ "$status" -ne 124 ] && [ "$status" -ne 130 ] && [ "$status" -ne 137 ]; then
    exit "$status"
fi
test -s "$out/bench.md"
test -s "$out/bench.csv"
echo "benchmarks/gpu.sh: see $out/bench.md and $out/bench.csv"
