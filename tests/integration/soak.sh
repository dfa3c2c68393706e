#!/bin/bash
# soak.sh TRAIN [STEPS] [OPTION...]: trains a small model for STEPS steps (default 20000) with
# evaluations and checkpoints. It makes two runs, and the second one resumes the first. Ten times a second
# it samples the process's memory, file handles and threads. Each must be flat after the first fifth of
# a run; memory may vary by 2 % and 8 MiB, because allocators do. Prints a table, with the median step
# time of each run's second and last tenth. OPTION is an option of //train, such as --device=cuda.
set -u
train=$(realpath "$1") steps=${2:-20000}; shift; shift
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
cd "$out" || exit 1
for ((i = 0; i < 4000; ++i)); do echo "sentence $((i * 7919 % 1000)) of many"; ((i % 4 < 3)) || echo; done >text.txt

failed=0
fail() { echo "FAILED: $*"; failed=1; }

# NAME STEPS OPTION...
run() {
  local name=$1 last=$2 pid folder; shift 2
  "$train" --data=text.txt --model='{"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":2,"ffn":64}' \
    --seqlen=64 --batch=4 --steps="$last" --warmup=10 --eval_every=200 --eval_batches=2 --checkpoint_every=500 \
    --log_every=1000 --sample=0 --out=run "$@" >"$name.log" 2>&1 &
  pid=$! folder=/proc/$pid
  while kill -0 $pid 2>/dev/null; do
    awk -v handles="$(find $folder/fd -type l 2>/dev/null | wc -l)" '
      /^VmRSS/ { memory = $2 } /^Threads/ { threads = $2 }
      END { if (memory) print memory, handles, threads }' $folder/status 2>/dev/null >>"$name.samples"
    sleep 0.1
  done
  wait $pid || { tail -n 5 "$name.log"; fail "$name ended with $?"; return; }
  # Compares the samples after the first fifth with those at the end.
  awk -v name="$name" '
    { memory[NR] = $1; handles[NR] = $2; threads[NR] = $3 }
    function median(a, from, to,   i, j, t, b, n) {
      for (i = from; i <= to; ++i) b[++n] = a[i]
      for (i = 1; i <= n; ++i) for (j = i + 1; j <= n; ++j) if (b[j] < b[i]) { t = b[i]; b[i] = b[j]; b[j] = t }
      return b[int((n + 1) / 2)]
    }
    END {
      if (NR < 10) { print name ": only " NR " samples; give more steps"; exit 1 }
      k = int(NR / 5)
      split("memory (KiB)|file handles|threads", title, "|")
      for (what = 1; what <= 3; ++what) {
        for (i = 1; i <= NR; ++i) a[i] = what == 1 ? memory[i] : what == 2 ? handles[i] : threads[i]
        early = median(a, k + 1, 2 * k); late = median(a, NR - k, NR - 1)
        grew = (late > early + (what == 1 ? 0.02 * early + 8192 : 0))
        printf "%-8s %-14s %10d after a fifth, %10d at the end%s\n", name, title[what], early, late,
               grew ? "   GREW" : ""
        if (grew) bad = 1
      }
      exit bad
    }' "$name.samples" || fail "$name holds more and more"
}

step_ms() {  # FIRST LAST: the median of these steps
  awk -v first="$1" -v last="$2" -F'"step_ms":' 'NR > first && NR <= last { split($2, a, "[,}]"); print a[1] }' \
    run/metrics.jsonl | sort -n | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'
}

half=$((steps / 2)) tenth=$((steps / 20))
run first "$half" "$@"
run resumed "$steps" --resume "$@"
[[ $(wc -l <run/metrics.jsonl) == "$steps" ]] || fail "metrics.jsonl has $(wc -l <run/metrics.jsonl) lines"
echo "step     median ms      $(step_ms $tenth $((2 * tenth))), $(step_ms $((half - tenth)) "$half"), resumed $(
  step_ms $((half + tenth)) $((half + 2 * tenth))), $(step_ms $((steps - tenth)) "$steps")"
((failed == 0)) && echo "PASSED: $steps steps"
exit $failed
