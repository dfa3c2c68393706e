#!/bin/bash

# Tests benchmarks/performance/render.py --check. The pages and plots must be what the files of results
# give. A table changed by hand, a changed plot, and a file or a table of results that the index lacks are refused.
set -euo pipefail

python=/usr/bin/python3
work=$TEST_TMPDIR/repository
mkdir -p "$work"
cp -RL README.md docs benchmarks "$work"
chmod -R u+w "$work"
cd "$work"

render=benchmarks/performance/render.py
"$python" "$render" --check

# refused MESSAGE: --check fails and says so.
refused() {
  if said=$("$python" "$render" --check); then
    echo "--check accepted: $1" >&2
    exit 1
  fi
  grep -qF "$1" <<<"$said" || { echo "--check did not say '$1', but: $said" >&2; exit 1; }
}

sed -i 's/^| D=128, full, 16K | [0-9]* |/| D=128, full, 16K | 1 |/' docs/performance.md
refused "docs/performance.md is stale"
"$python" "$render" >/dev/null
"$python" "$render" --check

echo '<svg/>' >docs/figures/roofline.svg
refused "docs/figures/roofline.svg is stale"
"$python" "$render" >/dev/null

echo '{}' >benchmarks/results/unused.json
refused "benchmarks/results/unused.json: benchmarks/results/README.md must have a row for it"
rm benchmarks/results/unused.json

sed -i 's/`sinks`/-/' benchmarks/results/README.md
refused "table sinks is on no page"

# --show prints a table, and refuses a name that is not one.
"$python" "$render" --show fp8_errors | grep -q "| normal | 4,096 | full | 0.053 |"
! "$python" "$render" --show no_such_table >/dev/null || exit 1

echo "[  PASSED  ] 7 tests."
