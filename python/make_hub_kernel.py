"""make_hub_kernel.py OUT.tar.xz WHEEL BACKEND [CAPABILITY...]: lays the package out for Hugging Face's `kernels`.

The archive is a repository of the Kernel Hub: build/VARIANT/ with the package and metadata.json. BACKEND is cpu, or cu
and the first CUDA version that the library serves (cu130). The library does not use torch's C++ interface. So one
variant of torch's stable interface serves all torch versions from STABLE on, which `kernels` asks for. Equal wheels
give equal bytes.
"""

import hashlib
import io
import json
import sys
import tarfile
import zipfile

NAME = "burst-attention"
VERSION = 1  # of the interface; the Hub has a branch for each
STABLE = "25"  # torch 2.5
_LEFT_OUT = "__main__.py"  # it imports the package as burst


def metadata(backend, capabilities, files):
    """Returns metadata.json. The id is a name for Python, and differs for other files."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    kind = {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": list(capabilities)}
    return {"id": "%s_%s_%s" % (NAME.replace("-", "_"), kind["type"], digest.hexdigest()[:12]), "name": NAME,
            "version": VERSION, "license": "Apache-2.0", "python-depends": [], "backend": kind}


def main(out, wheel, backend, *capabilities):
    with zipfile.ZipFile(wheel) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    files = sorted((name[len("burst/"):], data) for name, data in contents.items()
                   if name.startswith("burst/") and name != "burst/" + _LEFT_OUT)
    described = json.dumps(metadata(backend, capabilities, files), indent=2) + "\n"
    folder = "build/torch-stable-abi%s-%s-x86_64-linux/" % (STABLE, backend)
    entries = [(folder + name, data) for name, data in files + [("metadata.json", described.encode())]]
    entries += [("LICENSE", data) for name, data in contents.items() if name.endswith("/licenses/LICENSE")]
    with tarfile.open(out, "w:xz", preset=1) as archive:
        for name, data in sorted(entries):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if name.endswith(".so") else 0o644
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
