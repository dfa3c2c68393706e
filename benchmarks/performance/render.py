#!/usr/bin/env python3
"""Writes the tables and plots of the pages from the files of benchmarks/results.

  benchmarks/performance/render.py [--check]
  benchmarks/performance/render.py --show [TABLE ...]

A line "<!-- table: NAME -->" of a page is followed by the table NAME of tables.py. The plots of plots.py
are docs/figures/NAME.svg. --show prints tables: the named ones, or all.

--check writes nothing. The exit code is 1 if a table or a plot is stale, or if a table is neither on a page
nor named in benchmarks/results/README.md. It is also 1 if that page does not name a file of results.
"""

import re
import sys

from plots import PLOTS
from results import FOLDER, ROOT
from tables import TABLES, markdown

PAGES = ("README.md", "docs/performance.md", "docs/training/precision.md")
INDEX = "benchmarks/results/README.md"
FIGURES = "docs/figures"
MARK = re.compile(r"<!-- table: (\w+) -->$")


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


def show(names):
    for name in names or TABLES:
        if name not in TABLES:
            print("TABLE: must be one of %s; got %s" % (", ".join(sorted(TABLES)), name))
            return 2
        print("\n".join(["## " + name, "", TABLES[name].__doc__ or "", ""] + markdown(name) + [""]))
    return 0


def main(arguments):
    if arguments[:1] == ["--show"]:
        return show(arguments[1:])
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    shown, wanted = set(), {}
    for name in PAGES:
        wanted[name] = rendered((ROOT / name).read_text(encoding="utf-8"), shown)
    for name, plot in PLOTS.items():
        wanted["%s/%s.svg" % (FIGURES, name)] = plot()
    index = (ROOT / INDEX).read_text(encoding="utf-8")
    wrong = ["table %s is on no page, and %s does not name it" % (name, INDEX)
             for name in sorted(set(TABLES) - shown) if "`%s`" % name not in index]
    wrong += ["benchmarks/results/%s: %s must have a row for it; add the row or delete the file" % (path.name, INDEX)
              for path in sorted(FOLDER.glob("*.json")) if "(%s)" % path.name not in index]
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
