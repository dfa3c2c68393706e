#!/bin/bash
# mpirun_test.sh BINARY [MPIRUN]: runs mpi_communicator_checks as several processes, and checks from
# outside how they fail. Without MPIRUN the build has no MPI.
set -u
binary=$1 mpirun=${2:-}

fail() { echo "FAILED: $*"; exit 1; }
# expect CODE TEXT COMMAND...: runs a command. Its exit code must be CODE (any: not 0), and its output must have
# TEXT.
expect() {
  local want=$1 text=$2 code=0; shift 2
  local output; output=$(timeout 60 "$@" 2>&1) || code=$?
  echo "$output"
  [[ $code != 124 ]] || fail "hangs: $*"
  [[ $code == "$want" || ($want == any && $code != 0) ]] || fail "exit code $code, not $want: $*"
  [[ $output == *"$text"* ]] || fail "does not say '$text': $*"
}

# These files are for one GoogleTest; several processes must not write them.
unset XML_OUTPUT_FILE TEST_PREMATURE_EXIT_FILE

if [[ -z $mpirun ]]; then
  expect 2 "this build has no MPI" "$binary"
  echo "SKIPPED: built without Open MPI, so nothing runs under mpirun"
  exit 0
fi

if [[ $(id -u) == 0 ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export TMPDIR=/tmp  # Open MPI puts sockets there; their paths must be short
export HOME=${HOME:-/tmp}  # Open MPI 5 refuses to start without one
# Open MPI itself leaks at exit and synchronizes out of the thread sanitizer's sight.
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=ignore_noninstrumented_modules=1

for ranks in 1 2 3 4; do
  expect 0 "$ranks processes" "$mpirun" --oversubscribe -np "$ranks" "$binary"
done
expect 0 "1 processes" "$binary"  # without mpirun

expect 1 "rank 1 of 3 gave up: disk full" \
  "$mpirun" --oversubscribe -np 3 "$binary" abort
expect 3 "" "$mpirun" --oversubscribe -np 3 "$binary" exit
expect 2 "launched as one of 4 processes (PMI_SIZE), but MPI connects 1" env PMI_SIZE=4 "$binary"
