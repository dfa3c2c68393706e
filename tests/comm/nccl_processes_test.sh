#!/bin/bash
# nccl_processes_test.sh BINARY [RANKS]: runs nccl_communicator_checks with a GPU a process under every
# installed launcher. Then it kills a rank and checks what the others do. RANKS defaults to 2.
set -u
binary=$1 ranks=${2:-2} victim=$((${2:-2} / 2))
port=23456 out=$(mktemp -d); trap 'rm -rf "$out"' EXIT

fail() { echo "FAILED: $*"; exit 1; }
expect() {  # CODE TEXT COMMAND...
  local want=$1 text=$2 code=0; shift 2
  local output; output=$(timeout 100 "$@" 2>&1) || code=$?
  [[ $code == "$want" && $output == *"$text"* ]] ||
    { echo "$output"; fail "exit code $code, or no '$text' in the output above: $*"; }
  echo "ok: $*"
}
# Starts all ranks with the variables that torchrun (or srun) sets. stdout and stderr go to files.
start() {
  pids=()
  for ((rank = 0; rank < ranks; ++rank)); do
    env RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      "$binary" "$@" >"$out/$rank.out" 2>"$out/$rank.err" &
    pids+=($!)
  done
  port=$((port + 20))
}
# Checks that every rank but the given one ends within a minute with exit code 1 and the words on stderr.
expect_all_but() {
  local except=$1 text=$2 rank code start=$SECONDS
  for ((rank = 0; rank < ranks; ++rank)); do
    [[ $rank == "$except" ]] && continue
    code=0; wait "${pids[$rank]}" || code=$?
    cat "$out/$rank.err"
    [[ $code == 1 ]] || fail "rank $rank ended with $code"
    [[ $(cat "$out/$rank.err") == *"$text"* ]] || fail "rank $rank does not say '$text'"
  done
  ((SECONDS - start < 60)) || fail "the others took $((SECONDS - start)) s"
  echo "ok: '$text' after $((SECONDS - start)) s"
}
unset XML_OUTPUT_FILE TEST_PREMATURE_EXIT_FILE

if command -v mpirun >/dev/null; then
  [[ $(id -u) != 0 ]] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  expect 0 "$ranks processes" mpirun --oversubscribe -np "$ranks" "$binary" --gtest_brief=1
fi
if command -v torchrun >/dev/null; then
  expect 0 "PASSED" torchrun --standalone --nproc_per_node="$ranks" --no_python "$binary" \
    --gtest_brief=1 --gtest_filter='*Ring:*Split'
fi
srun_like() {
  for ((rank = 0; rank < ranks; ++rank)); do
    env SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS=$ranks SLURM_LOCALID=$rank \
      SLURM_NNODES=1 "$binary" "$@" --gtest_brief=1 &
  done
  local code=0; for ((rank = 0; rank < ranks; ++rank)); do wait -n || code=1; done; return $code
}
export -f srun_like; export ranks binary
expect 0 "srun" bash -c 'srun_like --gtest_filter=*Ring'
expect 0 "srun" bash -c 'srun_like library'
expect 0 "srun" env BURST_IPC=1 bash -c 'srun_like library'
# All streams share one queue of the GPU.
expect 0 "srun" env BURST_IPC=1 CUDA_DEVICE_MAX_CONNECTIONS=1 bash -c 'srun_like library --gtest_filter=*Ring'

start wait
for ((rank = 0; rank < ranks; ++rank)); do
  for ((i = 0; i < 300; ++i)); do grep -q "is process" "$out/$rank.out" && break; sleep 0.1; done
done
kill -9 "${pids[$victim]}"
expect_all_but "$victim" "rank $victim of $ranks was lost"

start abort
expect_all_but 1 "rank 1 of $ranks gave up: disk full"
echo PASSED
