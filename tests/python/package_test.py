"""Tests what pip and a new user see: the wheel's metadata, the source distribution, and python -m burst."""

import email
import glob
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from unittest import mock

import torch

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


def hub_kernel():
    found = glob.glob(os.path.join(os.environ.get("BURST_WHEELS", "python"), "burst_attention-hub.tar.xz"))
    return found[0] if found else None


def load_as(name, folder):
    """Imports a package under a name, as `kernels` does."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@unittest.skipUnless(hub_kernel(), "needs the repository for the Kernel Hub")
class HubKernelTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="burst-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with tarfile.open(hub_kernel()) as archive:
            archive.extractall(self.folder)
        self.variant, = glob.glob(os.path.join(self.folder, "build", "*"))
        with open(os.path.join(self.variant, "metadata.json")) as file:
            self.metadata = json.load(file)
        burst._library.library()  # from $BURST_LIBRARY; the hub's package must take the one in its own folder
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        self.addCleanup(self.forget)
        os.environ.pop("BURST_LIBRARY", None)

    def forget(self):
        for name in [name for name in sys.modules if name.split(".")[0] == self.metadata["id"]]:
            del sys.modules[name]

    def check_module(self, module):
        """Its results are burst's own, and so are its library and its operators."""
        self.assertIsNot(module, burst)
        self.assertEqual(os.path.dirname(module.__file__), self.variant)
        q, k, v = (torch.randn(1, 40, 4, 16, dtype=torch.float64) for _ in range(3))
        self.assertTrue(torch.equal(module.attention(q, k, v), burst.attention(q, k, v)))
        library = sys.modules[module.__name__ + "._library"].library()
        self.assertEqual(os.path.dirname(library._name), self.variant)
        if hasattr(torch.library, "custom_op"):
            operators = getattr(torch.ops, module.__name__)
            self.assertIsNot(operators.forward, torch.ops.burst.forward)
            compiled = torch.compile(lambda *x: (module.attention(*x), burst.attention(*x)), backend="aot_eager",
                                     fullgraph=True)
            self.assertTrue(torch.equal(*compiled(q, k, v)))

    def test_layout(self):
        backend = self.metadata["backend"]["type"]
        self.assertRegex(os.path.basename(self.variant), r"^torch-stable-abi25-(cpu|cu130)-x86_64-linux$")
        self.assertEqual(self.metadata["name"], "burst-attention")
        self.assertRegex(self.metadata["id"], r"^burst_attention_%s_[0-9a-f]{12}$" % backend)
        self.assertEqual("archs" in self.metadata["backend"], backend == "cuda")
        for name in ("__init__.py", "libburst.so", "py.typed"):
            self.assertTrue(os.path.exists(os.path.join(self.variant, name)), name)
        self.assertTrue(os.path.exists(os.path.join(self.folder, "LICENSE")))

    def test_import(self):
        """The package works under another name, next to burst itself."""
        self.check_module(load_as(self.metadata["id"], self.variant))

    def test_kernels(self):
        try:
            import kernels
        except ImportError:
            self.skipTest("needs the package kernels")
        backend = self.metadata["backend"]["type"]
        self.check_module(kernels.get_local_kernel(pathlib.Path(self.folder), backend=backend))


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
