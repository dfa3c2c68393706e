#!/bin/bash
# Unpacks //train:archive and runs its programs, which load nothing from outside the archive.
set -euo pipefail

fail() {
  echo "archive_test: $*" >&2
  exit 1
}

tar -C "$TEST_TMPDIR" -xf "$1"
root=$(echo "$TEST_TMPDIR"/burst-*-linux-x86_64)
loader=$root/lib/ld-linux-x86-64.so.2
for program in train generate tokenize plan import export; do
  outside=$("$loader" --list --library-path "$root/lib" "$root/libexec/$program" |
    grep -vE "linux-vdso|$root/lib/" || true)
  [ -z "$outside" ] || fail "$program loads $outside"
done

# The name of a link is the program's, from any folder and without an environment.
ln -s "$root/bin/train" "$TEST_TMPDIR/train"
cd /
env -i "$TEST_TMPDIR/train" --steps=2 --batch=2 --seqlen=64 --eval_every=0 --sample=0 --out="$TEST_TMPDIR/run"
[ -s "$TEST_TMPDIR/run/checkpoint.safetensors" ] || fail "train left no checkpoint"
env -i "$root/bin/generate" --checkpoint="$TEST_TMPDIR/run" --prompt=In --tokens=4 --temperature=0 || fail "generate"
env -i "$root/bin/plan" --model=llama_1b --seqlen=8192 --batch=1 --gpus=1xH200 | grep -q "tokens/s" || fail "plan"
[ -s "$root/licenses/libc6" ] || fail "no licenses"
