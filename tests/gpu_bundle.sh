#!/bin/bash
# Runs the GPU tests, then errors and TFLOP/s beside cuDNN. Results: attention.json, errors.json.
#     run.sh [OPTION...]   options of sm90_attention.py's bench, such as quick
cd "$(dirname "$0")" || exit 1
failed=0
for test in ./*_test; do
  "$test" --gtest_brief=1 || failed=1
done
python3 sm90_attention.py ./libburst_sm90.so check errors.json || failed=1
python3 sm90_attention.py ./libburst_sm90.so bench attention.json "$@" || failed=1
exit $failed
