#!/bin/bash
# Builds another Bazel workspace that depends on //burst:attention, and runs its program.
#
#   outside_workspace_test.sh [--module [BAZEL_OPTION ...]]
#
# The test has a WORKSPACE and is offline. --module takes a MODULE.bazel, for Bazel 7 and later, which
# loads rules from a registry. The inner Bazel has its own output base and ends with the test.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
repository=$(cd "$here/../.." && pwd)
work=${TEST_TMPDIR:-$(mktemp -d)}
outside=$work/outside
trap 'chmod -R u+w "$work"; rm -rf "$work"/*' EXIT

file=WORKSPACE options=()
if [ "${1:-}" = --module ]; then
  file=MODULE.bazel options=("${@:2}")
elif [[ $(bazel --version) =~ ^bazel\ [6-9] ]]; then
  options=(--noenable_bzlmod)
fi

mkdir "$outside"
cp "$here/outside/attend.cc" "$here/outside/$file" "$outside"
cp "$here/outside/BUILD.outside" "$outside/BUILD"
sed -i "s|path = \"burst\"|path = \"$repository\"|" "$outside/$file"

# CUDA is off: its kernels take minutes to compile, and the test is about the workspace.
cd "$outside"
output=$(bazel --batch --nohome_rc --output_user_root="$work/bazel" \
  run --cxxopt=-std=c++17 --repo_env=BURST_CUDA=0 --spawn_strategy=standalone "${options[@]}" //:attend)
echo "$output"
[ "$(sort <<<"$output")" = "rank 0 token 0: 0
rank 0 token 3: 1.5
rank 1 token 1: 0.5
rank 1 token 2: 1" ] || { echo "unexpected output"; exit 1; }
