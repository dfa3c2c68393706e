#!/bin/bash
# stress.sh TEST [RUNS] [JOBS] [FIRST]: runs random_training_cuda_test in fresh processes: RUNS
# configurations in all (default 300), JOBS processes at a time on the same GPUs (default 3). Each
# process takes one configuration, so the first use of every GPU and library is tested again and again.
# A process that takes more than two minutes counts as hung. The last line has the counts.
set -u
test=$(realpath "$1") runs=${2:-300} jobs=${3:-3} first=${4:-0}
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT

job() {
  local number=$1 n code
  mkdir -p "$out/$number"
  for ((n = first + number; n < first + runs; n += jobs)); do
    TEST_TMPDIR=$out/$number timeout -k 5 120 "$test" --first="$n" --count=1 >"$out/$number/log" 2>&1
    code=$?
    if ((code == 124 || code == 137)); then
      echo "hung: configuration $n"
    elif grep -q '^  refused: ' "$out/$number/log"; then
      echo refused
    elif ((code == 0)); then
      echo equal
    else
      echo "failed: configuration $n"; tail -n 20 "$out/$number/log" | sed 's/^/  | /'
    fi
  done
}

for ((j = 0; j < jobs; ++j)); do job "$j" >"$out/result.$j" & done
wait
cat "$out"/result.* | grep -v '^equal$\|^refused$'
count() { cat "$out"/result.* | grep -c "^$1"; }
echo "$(count equal) equal to one rank, $(count refused) refused, $(count failed) failed, $(count hung) hung"
(($(count failed) + $(count hung) == 0))
