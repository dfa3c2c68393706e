"""What pip calls (PEP 517): build_wheel runs Bazel, build_sdist packs the sources that it needs."""

import gzip
import io
import os
import shutil
import subprocess
import tarfile

import make_wheel

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = ("burst", "examples/pytorch", "python", "third_party")  # and the files in the root


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Returns the name of the wheel that is put into the folder. Raises RuntimeError without Bazel."""
    bazel = shutil.which("bazel") or shutil.which("bazelisk")
    if bazel is None:
        raise RuntimeError("bazel: must be installed to build from source; got none in PATH; run third_party/install.sh "
                           "on Debian or Ubuntu, or install a wheel")
    subprocess.run([bazel, "build", "--config=portable", "//python:wheel"], cwd=ROOT, check=True)
    folder = os.path.join(ROOT, "bazel-bin", "python")
    name, = (name for name in os.listdir(folder) if name.endswith(".whl"))
    shutil.copyfile(os.path.join(folder, name), os.path.join(wheel_directory, name))
    return name


def _sources():
    """Returns the paths of the files in a git clone, or in an unpacked sdist."""
    if os.path.exists(os.path.join(ROOT, ".git")):
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    else:
        names = [os.path.relpath(os.path.join(folder, name), ROOT)
                 for folder, _, files in os.walk(ROOT) if "__pycache__" not in folder for name in files]
    kept = (name for name in names if name and name != "PKG-INFO" and not name.startswith("bazel-") and (
        os.sep not in name or name.startswith(tuple(folder + os.sep for folder in _FOLDERS))))
    return sorted(name for name in kept if os.path.isfile(os.path.join(ROOT, name)))


def build_sdist(sdist_directory, config_settings=None):
    """Returns the name of the archive that is put into the folder. Equal sources give equal bytes."""
    with open(os.path.join(ROOT, "python/burst/__init__.py"), "rb") as file:
        version = make_wheel.version_of([("burst/__init__.py", file.read())])
    base = "%s-%s" % (make_wheel.NAME, version)
    out = os.path.join(sdist_directory, base + ".tar.gz")
    with open(out, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in _sources() + ["PKG-INFO"]:
            entry, path = tarfile.TarInfo(base + "/" + name), os.path.join(ROOT, name)
            if name == "PKG-INFO":
                data = make_wheel.METADATA.format(version=version).encode()
            else:
                with open(path, "rb") as source:
                    data = source.read()
                entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return os.path.basename(out)
