#!/bin/bash
# sanitize.sh [memcheck|racecheck ...] [--seconds=N] [--minutes=M]: runs compute-sanitizer over the GPU
# tests of this folder, by default with both tools. Tests of several ranks, also with NCCL, use all
# GPUs. In parallel with them, up to four tests at a time share each GPU (the tools need mostly the
# processor). A test is cut off after N seconds (default 60), and after M minutes (default 10) the
# remaining tests are left out. The last line counts all of these. The exit code is 1 if a tool found
# something or a test failed.
cd "$(dirname "$0")" || exit 1
tools=() seconds=60 minutes=10
for argument; do
  case $argument in
    memcheck | racecheck) tools+=("$argument") ;;
    --seconds=*) seconds=${argument#*=} ;;
    --minutes=*) minutes=${argument#*=} ;;
    *) echo "sanitize.sh: no option $argument" >&2; exit 2 ;;
  esac
done
((${#tools[@]})) || tools=(memcheck racecheck)
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
[[ -x $sanitizer ]] || { echo "sanitize.sh: no compute-sanitizer; it is a part of the CUDA toolkit" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus | wc -l)
((gpus > 0)) || { echo "sanitize.sh: no GPU" >&2; exit 2; }

# Columns: tools (m, r or both), program, filter. They reach every kernel at the smallest sizes.
rows=$(cat <<'END'
mr tensor_copy_cuda_test *
mr activations_cuda_test *
mr ops_cuda_test *-*Statistics*:*SameBits*:*Independent*:*DeathTest*
mr dense_ops_cuda_test *
mr matmul_cuda_test *-*SameBits*
mr ops_bf16_cuda_test *Rounded*:*Edges*
mr adamw_cuda_test *
mr weight_scales_test *Muon*
mr flash_attention_cuda_test Short/SweepTest*_d64_70x33:Short/SweepTest*_d7_*:*DTypeTest*
mr flash_attention_16bit_test Short/*_d64_70x33:Short/*_d128_70x33:Wide/*_d192_70x33
mr flash_attention_16bit_test FewQueries*3x2049*
m flash_attention_16bit_test *StridedOperands*:*BlocksOfKeys*
mr changed_scores_cuda_test *OfKeepsWeight*:*AreRaised*
m changed_scores_cuda_test *EqualNaive*/Documents
mr two_widths_cuda_test Halves/*_Documents_*_d192_v128_70x33:Halves/*_Blocks_*_d192_v128_70x33
m two_widths_cuda_test All/*StridedOperands*:All/*BlocksOfKeys*
mr sm90_wgmma_test *
mr sm90_fp8_test *Merged*:*ListsOf*:*SameBits*
m sm90_flash_attention_test *Masks*:*NoKeys*
m sm90_flash_attention_test *Grouped*:*Strides*:*GradientThroughLse*
m sm90_flash_attention_test *Merge*
r sm90_flash_attention_test *NoKeys*:*Merge*
r sm90_flash_attention_test *ManyTiles*
r sm90_flash_attention_test *Grouped*
mr transformer_cuda_test Transformer.Llama*:Transformer.Gpt2*:Ranks.*
mr decode_cuda_test *
mr recompute_cuda_test *
m parity_cuda_test *
m cuda_train_test *Resume*
m trainer_cuda_test *Recomputation*
END
)
# The tests of several ranks. The longest ones come last.
all_gpus=$(cat <<'END'
mr communicator_cuda_test All/SharedGpus*:Nccl.Checks
mr attention_op_cuda_test *
mr tensor_parallel_cuda_test *OverNccl:*MovesAndSums*
mr ring_cuda_test *
mr cross_attention_cuda_test *Other*:*Bytes*
mr burst_attention_cuda_test *OverNccl:*BFloat16:*Batched*
mr strategy_cuda_test *OverNccl:*Batched*
END
)

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
# run NUMBER TOOL PROGRAM FILTER: writes the output to $results/NUMBER.log, and one line to NUMBER.row.
run() {
  local log=$results/$1.log start=$SECONDS code=0 word=ok options=() tool_options=()
  local limit=$((minutes * 60 - SECONDS))
  ((limit < seconds)) || limit=$seconds
  if ((limit <= 0)); then
    echo "left out        $2 $3 $4" | tee "$results/$1.row"
    return
  fi
  [[ $3 != communicator_cuda_test ]] || options=(--ranks="$gpus")
  # NCCL asks the driver for kernels that may be missing, and goes on without them.
  [[ $2 != memcheck ]] || tool_options=(--report-api-errors no)
  timeout --kill-after=10 "$limit" "$sanitizer" --tool "$2" "${tool_options[@]}" --error-exitcode 97 \
    "./$3" --gtest_brief=1 "--gtest_filter=$4" "${options[@]}" >"$log" 2>&1 || code=$?
  # A test that was cut off passes only if nothing was found so far.
  case $code in
    0) grep -qE '\] [1-9][0-9]* tests? from' "$log" || word=FAILED ;;  # the filter matched no test
    124 | 137) word='cut off'; ! grep -qE '=========.*(Invalid|hazard|Error:)' "$log" || word=FAILED ;;
    *) word=FAILED ;;
  esac
  printf '%-8s %4d s  %-9s %s %s\n' "$word" $((SECONDS - start)) "$2" "$3" "$4" | tee "$results/$1.row"
  [[ $word != FAILED ]] || grep -v '^$' "$log" | head -n 40
}

number=0
work() {  # ROWS: a numbered line for each tool of each row
  local which program filter tool
  while read -r which program filter; do
    for tool in "${tools[@]}"; do
      [[ $which == *${tool:0:1}* ]] && echo $((++number)) "$tool" "$program" "$filter"
    done
  done <<<"$1"
}
work "$all_gpus" >"$results/all"
work "$rows" >"$results/each"
lanes=$(($(nproc) / 4)); ((lanes > 4 * gpus)) && lanes=$((4 * gpus)); ((lanes)) || lanes=1
while read -r number tool program filter; do
  run "$number" "$tool" "$program" "$filter" </dev/null
done <"$results/all" &
for ((lane = 0; lane < lanes; ++lane)); do
  while read -r number tool program filter; do
    CUDA_VISIBLE_DEVICES=$((lane % gpus)) run "$number" "$tool" "$program" "$filter" </dev/null
  done < <(awk -v n="$lanes" -v l="$lane" 'NR % n == l' "$results/each") &
done
wait

count() { cat "$results"/*.row | grep -c "^$1"; }
echo "compute-sanitizer: $(count ok) clean, $(count FAILED) failed, $(count 'cut off') cut off in peace after $seconds s," \
  "$(count 'left out') left out after $minutes minutes"
[[ $(count FAILED) == 0 ]]
