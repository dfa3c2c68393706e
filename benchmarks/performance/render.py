#!/usr/bin/env python3
"""Writes the tables and plots of the pages from the files of benchmarks/results.

  benchmarks/performance/render.py [--check]

A line "<!-- table: NAME -->" of a page is followed by the table NAME of tables.py. The plots of plots.py
are docs/figures/NAME.svg. With --check nothing is written: exit code 1 if a table or a plot is stale, if
a table is shown on no page, or if nothing refers to a file of results.
"""

import re
import sys

from plots import PLOTS
from results import FOLDER, ROOT
from tables import TABLES, markdown

PAGES = ("docs/performance.md", "benchmarks/results/README.md")
FIGURES = "docs/figures"
MARK = re.compile(r"<!-- table: (\w+) -->$")
# Where a file of results may be named.
REFERENCES = ("docs/*.md", "docs/decisions/*.md", "benchmarks/*.md", "benchmarks/results/*.md",
              "benchmarks/performance/*.py")


def rendered(page, shown):
    """Returns the page with its tables made anew; adds their names to `shown`."""
    lines, result = page.split("\n"), []
    while lines:
        line = lines.pop(0)
        result.append(line)
        mark = MARK.match(line)
        if mark:
            shown.add(mark.group(1))
            while lines and lines[0].startswith("|"):
                lines.pop(0)
            result += markdown(mark.group(1))
    return "\n".join(result)


def unnamed_results():
    text = "".join(path.read_text(encoding="utf-8") for glob in REFERENCES for path in sorted(ROOT.glob(glob)))
    return [path.name for path in sorted(FOLDER.glob("*.json")) if not re.search(r"\b%s\b" % path.stem, text)]


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    shown, wanted = set(), {}
    for name in PAGES:
        wanted[name] = rendered((ROOT / name).read_text(encoding="utf-8"), shown)
    for name, plot in PLOTS.items():
        wanted["%s/%s.svg" % (FIGURES, name)] = plot()
    wrong = ["table %s is shown on no page" % name for name in sorted(set(TABLES) - shown)]
    wrong += ["benchmarks/results/%s: nothing refers to it; delete it" % name for name in unnamed_results()]
    for name, text in wanted.items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments:
            wrong.append("%s is stale; run benchmarks/performance/render.py" % name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "%d tables and %d plots are up to date" % (len(shown), len(PLOTS)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
