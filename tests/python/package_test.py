"""Tests what pip and a new user see: the wheel's metadata, the source distribution, and python -m burst."""

import email
import glob
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

import burst
from harness import main, run_program

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def wheel():
    found = glob.glob(os.path.join(os.environ.get("BURST_WHEELS", "python"), "burst_attention-*.whl"))
    return found[0] if found else None


def check_metadata(test, data):
    fields = email.message_from_bytes(data)
    test.assertEqual((fields["Name"], fields["Version"]), ("burst-attention", burst.__version__))
    test.assertEqual(fields.get_all("Requires-Dist"), ["torch>=1.13", "transformers>=4.53; extra == 'transformers'"])
    for name in ("Author", "License-Expression", "License-File", "Project-URL", "Requires-Python", "Summary"):
        test.assertTrue(fields[name], name)
    test.assertIn("Typing :: Typed", fields.get_all("Classifier"))
    test.assertIn("burst.attention(q, k, v", fields.get_payload())
    try:
        from packaging import metadata
    except ImportError:
        return
    if "2.4" in getattr(metadata, "_VALID_METADATA_VERSIONS", ()):
        metadata.Metadata.from_email(data, validate=True)


class WheelTest(unittest.TestCase):
    @unittest.skipUnless(wheel(), "needs the package wheel")
    def test_content(self):
        with zipfile.ZipFile(wheel()) as files:
            names = files.namelist()
            info = "burst_attention-%s.dist-info/" % burst.__version__
            check_metadata(self, files.read(info + "METADATA"))
            record = files.read(info + "RECORD").decode()
        self.assertEqual(sorted(line.split(",")[0] for line in record.split()), sorted(names))
        for name in ("burst/py.typed", "burst/libburst.so", "burst/__main__.py", info + "licenses/LICENSE"):
            self.assertIn(name, names)


class SourceTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="burst-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name in ("pyproject.toml", "python/build_backend.py", "python/make_wheel.py", "python/burst/__init__.py"):
            path = os.path.join(self.folder, "tree", name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copyfile(os.path.join(ROOT, name), path)
        os.makedirs(os.path.join(self.folder, "tree/tests"))
        open(os.path.join(self.folder, "tree/tests/left_out"), "w").close()

    def call(self, tree, code, path=""):
        """Runs the backend as pip does: in the tree, with its folder in the path."""
        return subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, 'python')\n"
                               "import build_backend as b\n" + code], cwd=tree, capture_output=True, text=True,
                              env=dict(os.environ, PATH=path, PYTHONDONTWRITEBYTECODE="1"))

    def test_source_distribution(self):
        """An unpacked distribution makes the same distribution again."""
        tree, made = os.path.join(self.folder, "tree"), []
        for _ in range(2):
            done = self.call(tree, "print(b.build_sdist(%r))" % self.folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            name = "burst_attention-%s.tar.gz" % burst.__version__
            self.assertEqual(done.stdout.strip(), name)
            with open(os.path.join(self.folder, name), "rb") as file:
                made.append(file.read())
            with tarfile.open(fileobj=io.BytesIO(made[-1])) as archive:
                base = name[:-len(".tar.gz")] + "/"
                self.assertEqual([entry[len(base):] for entry in archive.getnames()], [
                    "pyproject.toml", "python/build_backend.py", "python/burst/__init__.py", "python/make_wheel.py",
                    "PKG-INFO"])
                check_metadata(self, archive.extractfile(base + "PKG-INFO").read())
                archive.extractall(os.path.join(self.folder, "unpacked"))
            tree = os.path.join(self.folder, "unpacked", base)
        self.assertEqual(*made)

    def test_build(self):
        """A build runs Bazel, takes the wheel that it leaves, and says what is missing without Bazel."""
        tree, bin_folder = os.path.join(self.folder, "tree"), os.path.join(self.folder, "bin")
        done = self.call(tree, "b.build_wheel(%r)" % self.folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("bazel: must be installed to build from source", done.stderr)
        os.makedirs(bin_folder)
        with open(os.path.join(bin_folder, "bazel"), "w") as file:
            file.write("#!/bin/sh\n/bin/mkdir -p bazel-bin/python && echo $* > bazel-bin/python/some.whl\n")
        os.chmod(file.name, 0o755)
        done = self.call(tree, "print(b.build_wheel(%r))" % self.folder, bin_folder)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "some.whl"), done.stderr)
        with open(os.path.join(self.folder, "some.whl")) as file:
            self.assertEqual(file.read().split(), ["build", "--config=portable", "//python:wheel"])


class ProgramTest(unittest.TestCase):
    def test_ranks(self):
        for ranks in (1, 2):
            said = run_program(ranks, "-m", "burst")
            self.assertEqual(said[-1] == "", ranks > 1)
            self.assertRegex(said[0], r"(?m)^burst +%s, " % re.escape(burst.__version__))
            self.assertRegex(said[0], r"(?m)^torch +\d")
            found = re.findall(r"self-test +right: 12 cases on (\w+) \w+ over (\d) ranks?, off by [\d.e-]+", said[0])
            self.assertEqual([dtype for dtype, _ in found][:2], ["float64", "float32"])
            self.assertEqual({count for _, count in found}, {str(ranks)})

    def test_wrong_results(self):
        """Results that differ are exit code 1."""
        program = ("import burst, runpy, sys\n"
                   "attention = burst.attention\n"
                   "burst.attention = lambda *x, **y: attention(*x, **y) * 1.001\n"
                   "sys.exit(__import__('burst.__main__', fromlist=['main']).main())")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("WRONG", done.stdout)


if __name__ == "__main__":
    main()
