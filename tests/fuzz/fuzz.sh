#!/bin/bash
# Runs a fuzzer of this folder; needs clang and libclang-rt-dev (third_party/install.sh --fuzz).
#
#   tests/fuzz/fuzz.sh NAME [--hours=H] [--out=FOLDER] [-OPTION=VALUE ...]
#
# NAME is a target of tests/fuzz/BUILD, such as schedule or safetensors. The run ends after H hours of
# processor time (default 1), or at the first input that fails. FOLDER (default fuzz-out, which git
# ignores) keeps the logs, and the corpus with which later runs start. Single-dash options are libFuzzer's.
#
# The last line is a row: name, processor seconds, inputs, coverage (edges), failed inputs. Copy a
# failed input to tests/fuzz/corpus/NAME under a name that says what was wrong; then CI replays it.
# The exit code is 1 if an input failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "tests/fuzz/fuzz.sh: $*" >&2; exit 2; }
name='' hours=1 out=fuzz-out options=()
for argument; do
  case $argument in
    --hours=*) hours=${argument#*=} ;;
    --out=*) out=${argument#*=} ;;
    --*) fail "there is no option $argument; see the head of this file" ;;
    -*) options+=("$argument") ;;
    *) name=$argument ;;
  esac
done
[ -d "tests/fuzz/corpus/${name:-none}" ] ||
  fail "'$name' is no target; there are: $(cd tests/fuzz/corpus && echo *)"
seconds=$(awk -v h="$hours" 'BEGIN { s = int(h * 3600); print s < 1 ? 1 : s }' </dev/null)
command -v clang >/dev/null || fail "no clang; third_party/install.sh --fuzz installs it"

bazel build --config=fuzz "//tests/fuzz:${name}_fuzz"
mkdir -p "$out/$name/corpus"
# The fuzzer is copied, because another build replaces the folder behind bazel-bin.
cp -f "bazel-bin/tests/fuzz/${name}_fuzz" "$out/$name/fuzzer"

log=$out/$name/log.$(date +%Y%m%d-%H%M%S)
status=0
BURST_FUZZ_CPU_SECONDS=$seconds "$out/$name/fuzzer" -rss_limit_mb=2048 -malloc_limit_mb=2048 \
  -timeout=60 -max_len=4096 -print_final_stats=1 "-artifact_prefix=$out/$name/" "${options[@]}" \
  "$out/$name/corpus" "tests/fuzz/corpus/$name" >"$log" 2>&1 || status=$?

inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
edges=$(grep -o 'cov: [0-9]*' "$log" | tail -1 | cut -d' ' -f2)
times >"$out/$name/times"  # the times of this shell, then of its children
cpu=$(awk 'NR == 2 { split($1, u, "[ms]"); split($2, s, "[ms]");
                     printf "%.0f", u[1] * 60 + u[2] + s[1] * 60 + s[2] }' "$out/$name/times")
failed=0
# Code 72 means that the timer ended it, as it should; 0 that an option such as -runs did.
if [ "$status" -ne 0 ] && [ "$status" -ne 72 ]; then
  failed=1
  tail -n 30 "$log" >&2
fi
echo "$name $cpu ${inputs:-0} ${edges:-0} $failed" | tee -a "$out/results.txt"
exit "$failed"
