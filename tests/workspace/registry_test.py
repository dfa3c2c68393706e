#!/usr/bin/env python3
"""Tests what other people's Bazel sees, without it: loads of rules, and the files of the Bazel Central Registry.

.ci/build_check must accept the tree, and refuse rules and objects that Bazel 9 does not have by itself. The templates
in .bcr must be what Publish-to-BCR fills in. The project has no public address yet, so they have OWNER/REPO in its
place. When README.md names one, the templates must name it, too.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLACEHOLDER = "OWNER/REPO"


def read(name):
    return (ROOT / name).read_text()


def address():
    """Returns OWNER/REPO of the project as README.md links it, or the placeholder."""
    found = re.search(r"https://github\.com/([\w.-]+/[\w.-]+)/releases", read("README.md"))
    return found.group(1) if found else PLACEHOLDER


class LoadsTest(unittest.TestCase):
    def check(self, *files):
        return subprocess.run([sys.executable, ".ci/build_check", *files], cwd=ROOT, capture_output=True, text=True)

    def test_tree(self):
        if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode != 0:
            self.skipTest("needs the git repository")
        done = self.check()
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_refused(self):
        load = 'load("@rules_cc//cc:cc_library.bzl", "cc_library")\n'
        for name, text, wrong in (("BUILD", load + 'cc_library(name = "a")\ncc_test(name = "b")\n', "cc_test"),
                                  ("a.bzl", load + "def f():\n    native.cc_library()\n", "cc_library"),
                                  ("b.bzl", "def f():\n    return CcInfo()\n", "CcInfo"),
                                  ("c.bzl", load + "def f():\n    cc_library()\n    native.genrule()\n", None)):
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder, name)
                path.write_text(text)
                done = self.check(str(path))
            self.assertEqual(done.returncode, 0 if wrong is None else 1, done.stdout)
            if wrong is not None:
                self.assertIn("%s must be loaded" % wrong, done.stdout)


class RegistryTest(unittest.TestCase):
    def test_metadata(self):
        found = json.loads(read(".bcr/metadata.template.json"))
        self.assertEqual(found["homepage"], "https://github.com/" + address())
        self.assertEqual(found["repository"], ["github:" + address()])
        self.assertEqual((found["versions"], found["yanked_versions"]), ([], {}))  # the registry fills them in
        for maintainer in found["maintainers"]:
            self.assertEqual(set(maintainer), {"name", "email", "github"})
            if address() != PLACEHOLDER:
                self.assertNotIn("EMAIL", maintainer.values())
                self.assertNotIn("OWNER", maintainer.values())
        if address() == PLACEHOLDER:
            print("not ready to publish: README.md names no releases, so .bcr has the placeholder " + PLACEHOLDER)

    def test_source(self):
        found = json.loads(read(".bcr/source.template.json"))
        self.assertEqual(set(found), {"integrity", "strip_prefix", "url"})
        self.assertEqual(found["integrity"], "")
        used = set(re.findall(r"\{(\w+)\}", found["url"] + found["strip_prefix"]))
        self.assertEqual(used, {"OWNER", "REPO", "TAG", "VERSION"})

    def test_presubmit(self):
        text = read(".bcr/presubmit.yml")
        packages = re.search(r"apt-get install --yes (.*)", text).group(1).split()
        listed = re.search(r"packages=\((.*?)\n\)", read("third_party/install.sh"), re.S).group(1)
        for package in packages:
            self.assertRegex(listed, r"(?m)^  %s( |$)" % re.escape(package))
        for package, target in re.findall(r'"@burst//([\w/]*):(\w+)"', text):
            self.assertIn('name = "%s"' % target, read("%s/BUILD" % package))
        least = re.search(r'bazel_compatibility = \[">=(\d+)', read("MODULE.bazel")).group(1)
        tried = re.findall(r"- (\d+)\.x", text)
        self.assertEqual(min(tried, key=int), least)

    def test_version(self):
        """One version is in the module, the C++ programs and the Python package."""
        versions = {re.search(pattern, read(name)).group(1) for name, pattern in (
            ("MODULE.bazel", r'version = "(.*?)"'), ("burst/base/version.h", r'kVersion\[\] = "(.*?)"'),
            ("python/burst/__init__.py", r'__version__ = "(.*?)"'))}
        self.assertEqual(len(versions), 1, versions)


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures) + len(result.errors)
    print("[  PASSED  ] %d tests." % (result.testsRun - failed))
    if failed:
        print(" %d FAILED TEST%s" % (failed, "" if failed == 1 else "S"))
    sys.exit(failed != 0)
