#!/bin/bash
# Runs .ci/pages and .ci/words on the repository: links, targets, options and files that pages name, and
# sentences. They must accept the tree, and refuse a page with faults. They read the files that git knows, so
# without git the test is skipped, with a message.
set -euo pipefail

root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..
cd "$root"
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  echo "not a git repository: nothing was tested"
  exit 0
fi

.ci/pages
.ci/words

page=$TEST_TMPDIR/page.md
cat >"$page" <<'END'
# Page

A [link](nowhere.md), `no/such/file.cc`, and a line of prose that is longer than the hundred and twenty characters that one may have.

```
bazel run //train -- --no_such_option
bazel test //no/such:target
```
END
# refused CHECK TEXT: the check fails for the page and says so.
refused() {
  if said=$("$1" ${3:-} "$page"); then
    echo "$1 accepted: $2" >&2
    exit 1
  fi
  grep -qF -- "$2" <<<"$said" || { echo "$1 did not say '$2', but: $said" >&2; exit 1; }
}
refused .ci/pages "the link nowhere.md leads nowhere"
refused .ci/pages "there is no file no/such/file.cc"
refused .ci/pages "line 3 must have at most 120 characters"
refused .ci/pages "--no_such_option is not an option of //train:train"
refused .ci/pages "there is no target //no/such:target"

echo "The rank is no number, so many times." >"$page"
refused .ci/words "'is no', 'is none'" --list
refused .ci/words "'so many', 'so much'" --list

echo "[  PASSED  ] 9 tests."
