#!/bin/bash
# two_hosts_test.sh TRAIN: trains on two hosts of two ranks each. The hosts are network namespaces
# with a name, an address and an /etc/hosts of their own, joined by a bridge; on each, the host's own
# name is 127.0.1.1, as Debian sets it up. Everything lies in namespaces of this script and ends with
# it. Skipped, with a word, where the system does not permit them.
set -u
fail() { echo "FAILED: $*"; exit 1; }

if [[ -z ${INSIDE_NAMESPACES:-} ]]; then
  as_root=(); [[ $(id -u) == 0 ]] || as_root=(--user --map-root-user)
  start=(unshare "${as_root[@]}" --net --mount --pid --fork --kill-child --mount-proc)
  if ! "${start[@]}" bash -c 'mount -t tmpfs none /run && ip netns add try &&
      ip -n try link set lo up && ip netns exec try unshare --uts true' >/dev/null 2>&1; then
    echo "SKIPPED: this system lets this user make no network namespaces, or has no iproute2"
    exit 0
  fi
  export INSIDE_NAMESPACES=1
  exec "${start[@]}" bash "$0" "$@"
fi

train=$(realpath "$1") work=${TEST_TMPDIR:-$(mktemp -d)} port=4000
export BURST_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
unset XDG_RUNTIME_DIR
cd "$work" || exit 1

mount -t tmpfs none /run
ip link set lo up
ip link add switch type bridge && ip link set switch up || fail "no bridge"
add_host() {  # NAME ADDRESS OTHER ITS_ADDRESS
  ip netns add "$1"
  ip link add "to_$1" type veth peer name eth0 netns "$1"
  ip link set "to_$1" master switch up
  ip -n "$1" link set lo up
  ip -n "$1" link set eth0 up
  ip -n "$1" address add "$2/24" dev eth0
  printf '127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n' "$1" "$4" "$3" >"hosts.$1"
}
add_host alpha 10.77.0.1 beta 10.77.0.2
add_host beta 10.77.0.2 alpha 10.77.0.1

# on HOST COMMAND...: runs it there.
on() {
  local host=$1; shift
  ip netns exec "$host" unshare --mount --uts bash -c \
    'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' \
    - "$work/hosts.$host" "$host" "$@"
}

text() { for ((i = 0; i < 300; ++i)); do echo "sentence $((i * 7919 % 1000)) of many"; done; }
text >text.txt
arguments=(--data="$work/text.txt" --batch=2 --seqlen=67 --lr=3e-3 --eval_every=0 --sample=0
  --checkpoint_every=0 --threads=1
  '--model={"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":2,"ffn":64}')

# start_ranks HOST FIRST OPTIONS...: two ranks, from FIRST on, as torchrun starts them.
start_ranks() {
  local host=$1 first=$2 rank; shift 2
  for rank in $first $((first + 1)); do
    on $host env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank - first)) LOCAL_WORLD_SIZE=2 \
      MASTER_ADDR=alpha MASTER_PORT=$port "$train" "${arguments[@]}" "$@" \
      >out.$rank 2>err.$rank &
    pids[rank]=$!
  done
}
# end_ranks CODE: every rank ends with the code.
end_ranks() {
  local rank code
  for rank in 0 1 2 3; do
    code=0; wait ${pids[rank]} || code=$?
    [[ $code == "$1" ]] || { tail -n 5 out.* err.*; fail "rank $rank ended with $code, not $1"; }
  done
  port=$((port + 20))
}
losses() { sed -n 's/.*"loss":\([^,}]*\).*/\1/p' "$1/metrics.jsonl"; }
wait_for_steps() {  # RUN STEPS
  for ((i = 0; i < 600; ++i)); do
    [[ -e $1/metrics.jsonl && $(wc -l <"$1/metrics.jsonl") -ge $2 ]] && return
    sleep 0.1
  done
  tail -n 5 out.* err.*; fail "$1 does not come to step $2"
}
wait_for_listener() {
  for ((i = 0; i < 600; ++i)); do
    [[ -n $(ip netns exec alpha ss -Hltn) ]] && return
    sleep 0.1
  done
  fail "rank 0 does not listen"
}

echo "== one rank, and threads"
"$train" "${arguments[@]}" --steps=30 --ranks=1 --out=one >out 2>&1 || { cat out; fail "one rank"; }
"$train" "${arguments[@]}" --steps=30 --ranks=4 --ranks_per_node=2 --out=threads >out 2>&1 ||
  { cat out; fail "threads"; }

echo "== a secret is needed"
(unset BURST_TOKEN; start_ranks alpha 0 --steps=1 --out=none; wait "${pids[0]}")
[[ $? == 2 && $(cat err.0) == *"BURST_TOKEN is not set"* ]] || { cat err.0; fail "without BURST_TOKEN"; }

echo "== two hosts, with strangers at the door"
start_ranks alpha 0 --steps=30 --out=hosts
wait_for_listener
on beta bash -c "for i in {1..20}; do exec {fd}<>/dev/tcp/alpha/$port; done
  exec {fd}<>/dev/tcp/alpha/$port; head -c 1000 /dev/urandom >&\$fd; sleep 0.3; echo asked" ||
  fail "no stranger came to rank 0: it listens on loopback alone"
start_ranks beta 2 --steps=30 --out=hosts
wait_for_steps hosts 2
for host in alpha beta; do
  [[ -z $(ip netns exec $host ss -Hltn) ]] || fail "a socket of $host still listens"
done
end_ranks 0
grep -q "rank 0 turned away 21 connections" err.0 || { cat err.0; fail "21 strangers are not counted"; }
[[ $(losses hosts) == $(losses threads) ]] || fail "not the bits of a double ring of threads"
paste <(losses hosts) <(losses one) | awk '
  { d = $1 / $2 - 1; if (d < 0) d = -d; if (d > 1e-5) bad = 1; ++n } END { exit bad || n != 30 }' ||
  fail "not the losses of one rank"

echo "== a link that comes back"
start_ranks alpha 0 --steps=300 --out=brief
start_ranks beta 2 --steps=300 --out=brief
wait_for_steps brief 5
ip link set to_beta down; sleep 3; ip link set to_beta up
end_ranks 0
[[ $(losses brief | head -n 5) ]] || fail "no losses"
[[ $(losses brief | wc -l) == 300 ]] || fail "the run did not go on to its end"

echo "== a link that stays down"
start_ranks alpha 0 --steps=100000 --out=cut
start_ranks beta 2 --steps=100000 --out=cut
wait_for_steps cut 5
ip link set to_beta down
since=$SECONDS
end_ranks 1
((SECONDS - since <= 40)) || fail "it took $((SECONDS - since)) s to end"
for rank in 0 1 2 3; do
  cat err.$rank
  lost=$((rank < 2 ? 2 : 0))
  grep -Eq "rank ($lost|$((lost + 1))) of 4 was lost: nothing heard of it for 2[0-9.]+ s, nor of" \
    err.$rank || fail "rank $rank does not name the ranks of the other host"
done
echo "PASSED after $SECONDS s"
