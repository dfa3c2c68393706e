#!/bin/bash
# watchdog_gpu_test.sh STUCK_TRAIN LAUNCHER.SH [RANKS]: one rank of a run on GPUs stands still. Checks that all
# ranks say where they and their GPUs are, as threads and as processes.
set -u
stuck=$(realpath "$1") launcher=$(realpath "$2") ranks=${3:-2}
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
cd "$out" || exit 1
for ((i = 0; i < 20000; ++i)); do echo "sentence $((i * 7919 % 1000)) of many"; done >text.txt
options=(--device=cuda --data="$out/text.txt" --steps=1000 --seqlen=256 --batch=4 --eval_every=0 --sample=0
         --patience=5 --model=llama_tiny)

check() {  # NAME CODE: checks the run's output
  cat "$1.log"
  [[ $2 == 1 ]] || { echo "FAILED: $1 ended with $2"; exit 1; }
  grep -q "no rank has made progress for 5 s" "$1.log" || { echo "FAILED: $1: no watchdog"; exit 1; }
  for ((rank = 0; rank < ranks; ++rank)); do
    grep -q "rank $rank: step .*; GPU: at step " "$1.log" || { echo "FAILED: $1: rank $rank"; exit 1; }
  done
}
code=0; timeout 100 "$stuck" 1 200 "${options[@]}" --ranks="$ranks" --out="$out/threads" >threads.log 2>&1 || code=$?
check threads $code
code=0; timeout 100 "$launcher" torchrun "$ranks" 5 "$stuck" 1 200 "${options[@]}" --out="$out/processes" \
  >processes.log 2>&1 || code=$?
check processes $code
echo PASSED
