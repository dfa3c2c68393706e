#!/bin/bash
# run.sh TEST.py: runs a test of the Python package with Debian's Python and its python3-torch, which
# third_party/install.sh installs. $BURST_PYTHON names another Python, with another torch.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
export PYTHONPATH=$here:$here/../../python PYTHONDONTWRITEBYTECODE=1
export BURST_LIBRARY=$PWD/burst/c/libburst.so OMP_NUM_THREADS=1
python=${BURST_PYTHON:-/usr/bin/python3}
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "$python has no torch: nothing was tested (third_party/install.sh installs python3-torch)"
  exit 0
fi
exec "$python" "$here/$1"
