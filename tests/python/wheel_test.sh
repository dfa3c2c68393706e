#!/bin/bash
# Installs the wheel with pip into a new virtual environment, and runs the example over two ranks. Torch
# comes from the Python outside.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
wheel=$(ls "$PWD"/python/burst_attention-*.whl)
python=${BURST_PYTHON:-/usr/bin/python3}
if ! "$python" -c 'import torch, ensurepip' 2>/dev/null; then
  echo "$python has no torch or no venv: nothing was tested (third_party/install.sh installs them)"
  exit 0
fi

work=$TEST_TMPDIR/venv
trap 'rm -rf "$work"' EXIT
"$python" -m venv --system-site-packages "$work"
"$work/bin/pip" install --quiet --no-index --no-deps --no-compile "$wheel"
unset PYTHONPATH BURST_LIBRARY
export OMP_NUM_THREADS=1
cd "$work"
"$work/bin/python" -c '
import burst
import os
import sys
assert burst.__file__.startswith(sys.prefix), burst.__file__
assert os.path.exists(os.path.join(os.path.dirname(burst.__file__), "py.typed"))
print("burst", burst.__version__)'
# These are torchrun's variables. torch 1.13's torchrun does not work with Python 3.11.
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$work/bin/python" -c '
import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])')
export MASTER_PORT
RANK=1 LOCAL_RANK=1 "$work/bin/python" "$here/../../examples/pytorch/ring.py" &
output=$(RANK=0 LOCAL_RANK=0 "$work/bin/python" "$here/../../examples/pytorch/ring.py")
wait $!
echo "$output"
grep -q "^1,024 tokens over 2 ranks: out is off by .*e-1[0-9]" <<<"$output"
