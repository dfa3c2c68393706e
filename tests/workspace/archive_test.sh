#!/bin/bash
# Unpacks //train:archive and runs its programs, which load nothing from outside the archive.
set -euo pipefail

fail() {
  echo "archive_test: $*" >&2
  exit 1
}

tar -C "$TEST_TMPDIR" -xf "$1"
root=$(echo "$TEST_TMPDIR"/burst-*-linux-x86_64)
glibc=$root/lib/glibc
for program in train generate tokenize plan import export; do
  outside=$("$glibc/ld-linux-x86-64.so.2" --list --library-path "$glibc:$root/lib" "$root/libexec/$program" |
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

# loads_own_libc [VARIABLE=VALUE...]: whether a program takes the archive's C library in this environment.
loads_own_libc() {
  rm -f "$TEST_TMPDIR"/loaded.*
  env -i LD_DEBUG=libs LD_DEBUG_OUTPUT="$TEST_TMPDIR/loaded" "$@" "$root/bin/plan" --help >/dev/null ||
    fail "plan --help"
  grep -q "calling init: .*/lib/glibc/libc.so.6" "$TEST_TMPDIR"/loaded.*
}
# This machine built the archive, so its C library is new enough. An older machine's is not.
! loads_own_libc || fail "a program takes the archive's C library where the machine's is as new"
mkdir "$TEST_TMPDIR/old"
printf '#!/bin/sh\necho glibc 2.9\n' >"$TEST_TMPDIR/old/getconf"
chmod +x "$TEST_TMPDIR/old/getconf"
loads_own_libc PATH="$TEST_TMPDIR/old:/usr/bin:/bin" || fail "a program takes the C library of an older machine"

[ -s "$root/licenses/libc6" ] || fail "no licenses"

# Python is the machine's, Jinja the archive's. chat finds the archive's generate.
echo '{"messages": [{"role": "user", "content": "hello"}]}' >"$TEST_TMPDIR/chats.jsonl"
echo '{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}' >"$TEST_TMPDIR/template.jinja"
env -i PYTHONVERBOSE=1 "$root/bin/chats" --data="$TEST_TMPDIR/chats.jsonl" --template="$TEST_TMPDIR/template.jinja" \
  --roles=user --out="$TEST_TMPDIR/rendered.jsonl" 2>"$TEST_TMPDIR/said" || fail "chats: $(tail -n 3 "$TEST_TMPDIR/said")"
grep -q '"user: hello' "$TEST_TMPDIR/rendered.jsonl" || fail "chats left $(cat "$TEST_TMPDIR/rendered.jsonl")"
grep -q "$root/libexec/python/jinja2/sandbox.py" "$TEST_TMPDIR/said" || fail "chats loads another Jinja"
said=$(echo hello | env -i "$root/bin/chat" --checkpoint="$TEST_TMPDIR/run" --template="$TEST_TMPDIR/template.jinja" \
  --tokens=4) || fail "chat: $said"
[ -s "$root/licenses/python3-jinja2" ] || fail "no license of Jinja"
