#!/usr/bin/env bash
# Check trilGPT on an NVIDIA GPU: tests, a run with each attention backend, and its speed beside other programs.
#
#     pip install -e ".[dev]"
#     benchmarks/gpu_check.sh                         all parts, in ten minutes at most
#     benchmarks/gpu_check.sh tests backends bench    without a network; the other parts are nanogpt and generation
#
# It writes runs/gpu-check-<time>.md, a page that can be pasted into an issue. The exit code is 1 if a part fails.
# nanogpt and generation clone nanoGPT, and nanogpt downloads GPT-2's vocabulary. Environment variables:
#
#     NANOGPT                the absolute path of a checkout of nanoGPT, instead of a clone
#     PYTEST, TRAIN, BENCH   more words for these commands: TRAIN="train.steps=20" benchmarks/gpu_check.sh backends
#     MINUTES                time limit of all parts together, 10 by default: set more for a slower GPU
#     PYTHON                 the interpreter, python by default
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python} name=gpu-check-$(date +%Y%m%d-%H%M%S) failed=0
page=runs/$name.md
parts="${*:-tests backends bench nanogpt generation}"
for part in $parts; do
  case $part in tests | backends | bench | nanogpt | generation) ;; *)
    echo "gpu_check.sh: there is no part $part; use tests, backends, bench, nanogpt or generation" >&2
    exit 2 ;;
  esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
mkdir -p runs

# check TITLE LINES COMMAND...: runs a command, and adds its last lines to the page, or 45 if it fails
check() {
  local title=$1 lines=$2 started=$SECONDS code=0 result=ok limit=$((${MINUTES:-10} * 60 - SECONDS))
  shift 2
  printf '%s ... ' "$title" >&2
  timeout --foreground -k 10 $((limit > 0 ? limit : 1)) "$@" >"$work/output" 2>&1 || code=$?
  if [ $code = 124 ] || [ $code = 137 ]; then result="stopped by the time limit"; elif [ $code != 0 ]; then result="exit code $code"; fi
  [ $code = 0 ] || { failed=1; lines=45; }
  echo "$result, $((SECONDS - started)) s" >&2
  printf '\n## %s: %s, %d s\n\n```\n$ %s\n' "$title" "$result" $((SECONDS - started)) "$*" >>"$page"
  tail -n "$lines" "$work/output" >>"$page"
  printf '```\n' >>"$page"
  return $code
}

has() { [[ " $parts " == *" $1 "* ]]; }

describe="import sys, torch
torch.cuda.is_available() or sys.exit('gpu_check.sh: PyTorch finds no CUDA GPU; install the build of torch for your CUDA version')
d = torch.cuda.get_device_properties(0)
print(f'{d.name}, {d.total_memory / 2**30:.0f} GiB, compute capability {d.major}.{d.minor}, number of GPUs: {torch.cuda.device_count()}')
print(f'torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}')"
gpu=$($python -c "$describe") || exit 2
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
printf '# GPU check\n\n%s\n\ndriver %s, commit %s, %s\n' "$gpu" "${driver:-unknown}" "$(git rev-parse --short HEAD)" "$(date -I)" >"$page"

if has tests; then
  check "tests" 20 $python -m pytest -m gpu -n 4 ${PYTEST:-}
fi
if has backends; then
  model="model.n_layer=6 model.n_head=6 model.n_embd=384 model.block_size=1024 train.batch_size=16"
  for backend in naive sdpa flash cudnn flex; do
    check "attention=$backend" 0 $python train.py device=cuda attention="$backend" name="$name-$backend" $model \
      train.steps=100 eval.every=100 compile=false ${TRAIN:-}
  done
  check "comparison" 45 $python compare.py runs/"$name"-*
fi
if has bench; then
  check "bench" 99 $python bench.py device=cuda name="$name" "dtypes=[bfloat16]" \
    "block_sizes=[1024,4096]" batch_size=16 rounds=3 seconds=0.1 ${BENCH:-}
fi
if has nanogpt || has generation; then
  nanogpt=${NANOGPT:-$work/nanoGPT}
  [ -d "$nanogpt" ] || check "nanoGPT" 0 git clone -q --depth 1 https://github.com/karpathy/nanoGPT "$nanogpt" || parts=
fi
if has nanogpt; then
  cat "$($python -c 'import os; print(os.path.dirname(os.__file__))')"/*.py >"$work/text.txt"
  check "training step of GPT-2 124M" 9 $python benchmarks/nanogpt_speed.py step "$nanogpt" "$work/text.txt" \
    --recipe gpt2_124m --rounds 1
fi
if has generation; then
  check "generation" 45 $python benchmarks/generation_speed.py "$nanogpt" --device cuda --dtype bfloat16 --rounds 3
fi
echo "written $page" >&2
exit $failed
