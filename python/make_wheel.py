"""make_wheel.py OUT.whl LICENSE FILE...: packs the package and its library into a wheel.

The distribution is burst-attention, because PyPI's burst is another project; the module is burst. The wheel holds the files of the folder burst. Equal files give equal bytes.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile

NAME = "burst_attention"
TAG = "py3-none-manylinux_2_28_x86_64"  # what the library asks of glibc: //tests/c:library_test

METADATA = """Metadata-Version: 2.4
Name: burst-attention
Version: {version}
Summary: Exact attention over sequences that are spread over ranks: BurstAttention for PyTorch
Author: The Burst authors
License-Expression: Apache-2.0
License-File: LICENSE
Project-URL: Paper, https://arxiv.org/abs/2403.09347
Keywords: attention,context parallelism,sequence parallelism,long context,ring attention,flash attention
Classifier: Development Status :: 4 - Beta
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Requires-Python: >=3.9
Requires-Dist: torch>=1.13
Provides-Extra: transformers
Requires-Dist: transformers>=4.53; extra == 'transformers'
Description-Content-Type: text/markdown

`burst.attention(q, k, v, group=...)` computes exact attention over a sequence whose tokens are spread over the ranks
of a torch.distributed group. The module is named `burst`.

    import burst, torch, torch.distributed as dist     # torchrun --nproc_per_node=4 FILE.py
    dist.init_process_group()
    group = dist.group.WORLD
    q, k, v = (burst.shard(torch.randn(1, 4096, 8, 64), dim=1, group=group) for _ in range(3))
    out = burst.attention(q, k, v, causal=True, group=group)

`torchrun --nproc_per_node=4 -m burst` prints versions and tests attention over the ranks. The wheel is for Linux on
x86-64 (AVX2) with glibc 2.28 or newer. NCCL, for several GPUs, is torch's own. To build it from source: a machine
that README.md names, `third_party/install.sh`, then `pip install .`, which calls Bazel.
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
        sources.append((info + "licenses/LICENSE", file.read()))
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
