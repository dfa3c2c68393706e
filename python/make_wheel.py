"""make_wheel.py OUT.whl LICENSE FILE...: packs the package and its library into a wheel.

The wheel holds the files of the folder burst. Equal files give equal bytes.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile

NAME = "burst_attention"
TAG = "py3-none-manylinux_2_34_x86_64"  # what the library asks of glibc: //tests/c:library_test

METADATA = """Metadata-Version: 2.1
Name: burst-attention
Version: {version}
Summary: Exact attention over sequences that are spread over ranks: BurstAttention for PyTorch
License: Apache-2.0
Requires-Python: >=3.9
Description-Content-Type: text/plain

burst.attention(q, k, v, group=...) computes exact attention over a sequence whose tokens are spread
over the ranks of a torch.distributed group. It needs torch >= 1.13, and NCCL, torch's own, for
several GPUs.
"""

WHEEL = """Wheel-Version: 1.0
Generator: burst
Root-Is-Purelib: false
Tag: {tag}
"""


def version_of(sources):
    text = next(data for name, data in sources if name == "burst/__init__.py").decode()
    return re.search('__version__ = "(.*)"', text).group(1)


def main(out, license_file, *files):
    sources = []
    for path in files:
        with open(path, "rb") as file:
            sources.append(("burst/" + os.path.basename(path), file.read()))
    version = version_of(sources)
    info = "%s-%s.dist-info/" % (NAME, version)
    with open(license_file, "rb") as file:
        sources.append((info + "LICENSE", file.read()))
    sources.append((info + "METADATA", METADATA.format(version=version).encode()))
    sources.append((info + "WHEEL", WHEEL.format(tag=TAG).encode()))
    record = ""
    for name, data in sources:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += "%s,sha256=%s,%d\n" % (name, digest, len(data))
    record += info + "RECORD,,\n"
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in sorted(sources) + [(info + "RECORD", record.encode())]:
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
