#!/bin/bash
# Runs the GPU tests, on all GPUs those of several; then errors and TFLOP/s beside cuDNN, and
# bandwidths beside NCCL alone. Results: attention.json, errors.json.
#     run.sh [OPTION...]   options of sm90_attention.py's bench, such as quick
cd "$(dirname "$0")" || exit 1
failed=0
gpus=$(nvidia-smi --list-gpus | wc -l)
for test in ./*_test; do
  options=(); [[ $test != ./communicator_cuda_test ]] || options=(--ranks="$gpus")
  "$test" --gtest_brief=1 "${options[@]}" || failed=1
done
if ((gpus > 1)); then
  ./nccl_processes_test.sh ./nccl_communicator_checks "$gpus" || failed=1
  ./multi_gpu_train_test.sh ./train "$gpus" || failed=1
  ./nccl_benchmark || failed=1
fi
python3 sm90_attention.py ./libburst_sm90.so check errors.json || failed=1
python3 sm90_attention.py ./libburst_sm90.so bench attention.json "$@" || failed=1
exit $failed
