#!/bin/bash
# Runs all tests on GPUs (those of several ranks on all GPUs), then the benchmarks with their limits and
# peers. Prints tables and writes the results to *.json.
#     run.sh [--data=tinyshakespeare.txt] [OPTION...]   options of sm90_attention.py's bench, such as quick
# With --data it also trains nanoGPT's GPU setting.
cd "$(dirname "$0")" || exit 1
data=
[[ ${1-} != --data=* ]] || { data=$(cd "$OLDPWD" && realpath "${1#--data=}"); shift; }
failed=()
run() { "$@" || failed+=("${*:1:2}"); }
gpus=$(nvidia-smi --list-gpus | wc -l)
for test in ./*_test; do
  options=(); [[ $test != ./communicator_cuda_test ]] || options=(--ranks="$gpus")
  run "$test" --gtest_brief=1 "${options[@]}"
done
if ((gpus > 1)); then
  run ./nccl_processes_test.sh ./nccl_communicator_checks "$gpus"
  run ./multi_gpu_train_test.sh ./train "$gpus"
  run ./watchdog_gpu_test.sh ./stuck_train ./launcher.sh "$gpus"
  run ./nccl_benchmark
  strategies=burst,ring; ((32 % gpus)) || strategies+=,ulysses,tp,tp+sp  # these divide the 32 heads
  for mask in full causal; do
    run ./scaling --heads=32 --head_dim=128 --mask=$mask --ranks="$gpus" --strategies=$strategies \
      --seqlens=$((8192 * gpus)),$((16384 * gpus)) --out=scaling_$mask
  done
fi
run ./dense_benchmark --benchmark_out=dense.json --benchmark_out_format=json
run ./ops_benchmark --benchmark_out=ops.json --benchmark_out_format=json
[[ -z $data ]] || run ./convergence_benchmark --data="$data" --benchmark_filter=nanogpt_gpu
run python3 sm90_attention.py ./libburst_sm90.so check errors.json
run python3 sm90_attention.py ./libburst_sm90.so bench attention.json "$@"
run python3 sm90_attention.py ./libburst_sm90.so decode decode.json
run python3 gpu_train_step.py ./train_step_benchmark train_step.json
((${#failed[@]} == 0)) || { printf 'FAILED: %s\n' "${failed[@]}"; exit 1; }
echo PASSED
