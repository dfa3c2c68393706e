#!/bin/bash
# Builds another Bazel workspace that depends on //burst:attention, offline, and runs its program. The
# inner Bazel has its own output base and ends with the test.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
repository=$(cd "$here/../.." && pwd)
outside=$TEST_TMPDIR/outside
trap 'chmod -R u+w "$TEST_TMPDIR"; rm -rf "$TEST_TMPDIR"/*' EXIT

mkdir "$outside"
cp "$here/outside/attend.cc" "$here/outside/WORKSPACE" "$outside"
cp "$here/outside/BUILD.outside" "$outside/BUILD"
sed -i "s|path = \"burst\"|path = \"$repository\"|" "$outside/WORKSPACE"

# CUDA is off: its kernels take minutes to compile, and the test is about the workspace.
cd "$outside"
output=$(bazel --batch --nohome_rc --output_user_root="$TEST_TMPDIR/bazel" \
  run --cxxopt=-std=c++17 --repo_env=BURST_CUDA=0 --spawn_strategy=standalone //:attend)
echo "$output"
[ "$(sort <<<"$output")" = "rank 0 token 0: 0
rank 0 token 3: 1.5
rank 1 token 1: 0.5
rank 1 token 2: 1" ] || { echo "unexpected output"; exit 1; }
