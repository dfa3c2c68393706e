#!/bin/bash
# two_hosts_test.sh TRAIN PAUSING_TRAIN
#
# Trains on two hosts of two ranks each. The link between the hosts goes down, at any time and at
# every place of a run (//tests/faults:pausing_train stands still there). The hosts are network
# namespaces, joined by a bridge, with their own names, addresses and /etc/hosts. On each host its own
# name is 127.0.1.1, as in Debian. All namespaces end with this script. Where the system does not permit
# namespaces, the test is skipped with a message.
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

train=$(realpath "$1") pausing_train=$(realpath "$2") work=${TEST_TMPDIR:-$(mktemp -d)} port=4000
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

# on HOST COMMAND...: runs the command on a host.
on() {
  local host=$1; shift
  ip netns exec "$host" unshare --mount --uts bash -c \
    'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' \
    - "$work/hosts.$host" "$host" "$@"
}

text() { for ((i = 0; i < 300; ++i)); do echo "sentence $((i * 7919 % 1000)) of many"; done; }
text >text.txt
common=(--data="$work/text.txt" --batch=2 --seqlen=67 --lr=3e-3 --sample=0 --threads=1
  '--model={"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":2,"ffn":64}')
arguments=("${common[@]}" --eval_every=0 --checkpoint_every=0)

# start_ranks HOST FIRST OPTIONS...: starts the ranks FIRST and FIRST + 1 as torchrun does.
start_ranks() {
  local host=$1 first=$2 rank; shift 2
  for rank in $first $((first + 1)); do
    on $host env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank - first)) LOCAL_WORLD_SIZE=2 \
      MASTER_ADDR=alpha MASTER_PORT=$port "$train" "${arguments[@]}" "$@" \
      >out.$rank 2>err.$rank &
    pids[rank]=$!
  done
}
# end_ranks CODE: waits for all ranks; each must end with the code.
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

echo "== a host with another option, and with paths of its own"
start_ranks alpha 0 --steps=30 --out=other
start_ranks beta 2 --steps=30 --out=other --lr=0.5
end_ranks 1
for rank in 0 1 2 3; do
  grep -q -e "error: --lr: 0.5 on rank 2, 0.003 on rank 0" err.$rank || { cat err.$rank; fail "rank $rank does not name --lr"; }
done
[[ ! -e other ]] || fail "the run began"
cp text.txt "copy of text.txt"
start_ranks alpha 0 --steps=2 --out=other
start_ranks beta 2 --steps=2 --out=other --data="$work/copy of text.txt" --data_cache="$work/cache of beta"
end_ranks 0

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
ip link set to_beta up

# ---- The link goes down at every place of a run. Columns: the place, the step saved there, the rank that
# stands still. While rank 0 writes the checkpoint of step 12, the steps go on to the save after step 16.
places=("data 0 1" "start 0 4" "forward 6 3" "backward 6 3" "evaluation 8 3" "save 8 1" "write 12 3" "exit 24 1")
saved=(0 0 4 4 4 4 12 24)
pausing=(2 2 2 2 2 2 0 2)
at_places=("${common[@]}" --steps=24 --eval_every=8 --eval_batches=4 --checkpoint_every=4)

# start_job NAME PAUSING_RANK PLACE OPTIONS...: starts four ranks of a run. NAME.pause exists while one stands
# still.
start_job() {
  local name=$1 pausing=$2 place=$3 rank host pause; shift 3
  for rank in 0 1 2 3; do
    host=alpha pause=(); ((rank < 2)) || host=beta
    ((rank != pausing)) || pause=(PAUSE_AT="$place" PAUSE_FILE="$work/$name.pause")
    on $host bash -c 'echo $$ >"$1"; shift; exec "$@"' - "$name.pid.$rank" env "${pause[@]}" RANK=$rank \
      WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 MASTER_ADDR=alpha MASTER_PORT=$port \
      "$pausing_train" "${at_places[@]}" --out="$name" "$@" >"$name.out.$rank" 2>"$name.err.$rank" &
    jobs[$name.$rank]=$!
  done
  port=$((port + 20))
}
declare -A jobs
start_jobs() {  # NAME: starts a job for every place
  local i j
  for i in "${!places[@]}"; do
    start_job "$1$i" "${pausing[i]}" "${places[i]}"
    for ((j = 0; j < 600; ++j)); do [[ -e $1$i.pause ]] && break; sleep 0.1; done
    [[ -e $1$i.pause ]] || { tail -n 5 "$1$i".err.*; fail "$1$i does not come to ${places[i]}"; }
    # The pausing rank may be at its exit while rank 0 still checks that the last step can be saved.
    for ((j = 0; j < 600 && saved[i] == 24; ++j)); do
      grep -aq '"step":"24"' "$1$i/checkpoint.safetensors" && break; sleep 0.1
    done
  done
}
show() { tail -n 5 "$1".out.* "$1".err.*; fail "$1 (${places[${1//[a-z]/}]}): $2"; }
end_job() {  # NAME CODES RANK...: each rank must end with one of the codes
  local name=$1 codes=$2 rank code; shift 2
  for rank in "$@"; do
    code=0; wait "${jobs[$name.$rank]}" || code=$?
    [[ " $codes " == *" $code "* ]] || show "$name" "rank $rank ended with $code"
  done
}
rows() { sed -E 's/"(tokens_per_second|step_ms|exposed_ms)":[^,}]*,?//g' "$1/metrics.jsonl"; }
tensors() {  # prints the tensors of a checkpoint, which follow its header
  local file=$1/checkpoint.safetensors
  tail -c +$(($(od -An -tu8 -N8 "$file") + 9)) "$file"
}
expect_straight() {  # NAME
  [[ $(rows "$1") == "$(rows straight)" ]] || show "$1" "other metrics than undisturbed"
  cmp -s <(tensors "$1") <(tensors straight) || show "$1" "other weights than undisturbed"
}
"$train" "${at_places[@]}" --ranks=4 --ranks_per_node=2 --out=straight >out 2>&1 ||
  { cat out; fail "straight"; }

echo "== a link that comes back, at every place"
start_jobs back
ip link set to_beta down
start_job early -1 ""
rm back*.pause
sleep 3; ip link set to_beta up
for name in back{0..7} early; do
  end_job "$name" 0 0 1 2 3
  expect_straight "$name"
done

echo "== a link that stays down, and a host that vanishes, at every place"
start_jobs cut
start_jobs gone
ip link set to_beta down
since=$SECONDS
start_job never -1 "" --patience=5
for name in gone{0..7}; do kill -9 $(cat "$name".pid.[23]) 2>/dev/null; done
rm cut*.pause gone*.pause 2>/dev/null
for i in "${!places[@]}"; do
  codes=1; [[ ${places[i]} != exit* ]] || codes="0 1"  # the run was complete
  end_job "cut$i" "$codes" 0 1 2 3
  end_job "gone$i" "$codes" 0 1
done
end_job never 1 0 1 2 3
((SECONDS - since <= 60)) || fail "it took $((SECONDS - since)) s to end"
wait 2>/dev/null
ip link set to_beta up
grep -q "error: rank 0 waited 5 s in vain for rank 2, 3 of 4" never.err.0 &&
  grep -q "error: rank 2 of 4 found no rank 0 at alpha:" never.err.2 || show never "does not say who is missing"
for i in "${!places[@]}"; do
  for name in cut$i gone$i; do
    for rank in 0 1 2 3; do
      [[ ${places[i]} != exit* && ($rank -lt 2 || $name == cut*) ]] || continue
      lost=$((rank < 2 ? 2 : 0))
      grep -Eq "error: rank ($lost|$((lost + 1))) of 4 was lost: nothing heard of it for 2[0-9.]+ s" \
        "$name.err.$rank" || show "$name" "rank $rank does not name the ranks of the other host"
    done
    if ((${saved[i]} < 24)); then
      resume=(); ((${saved[i]} == 0)) || resume=(--resume)
      "$train" "${at_places[@]}" --ranks=4 --ranks_per_node=2 --comm=threads --out=$name "${resume[@]}" \
        >"$name.out.4" 2>"$name.err.4" || show "$name" "does not continue"
      steps=${saved[i]}; [[ ${places[i]} != write* ]] || steps="(12|16)"
      ((${saved[i]} == 0)) || grep -Eq "continuing after step $steps$" "$name.out.4" ||
        show "$name" "not saved: step ${saved[i]}"
    fi
    expect_straight "$name"
  done
done
echo "PASSED after $SECONDS s"
