"""The libraries that Burst needs, for its own workspace and for those that depend on it.

A WORKSPACE (Bazel 4.2 to 8):

    local_repository(name = "burst", path = "...")
    load("@burst//third_party:repositories.bzl", "burst_repositories")
    burst_repositories()

A MODULE.bazel (Bazel 7 to 9) needs bazel_dep(name = "burst") alone.
"""

load("//third_party:system.bzl", "system_repository")
load("//third_party/bazel:offline.bzl", "offline_repositories")
load("//third_party/cuda:configure.bzl", "cuda_configure")
load("//third_party/mpi:configure.bzl", "mpi_configure")
load("//third_party/text:kjv.bzl", "kjv_text")

# Debian's packages, as third_party/install.sh installs them.
_DEBIAN = {
    "absl": "/usr",
    "benchmark": "/usr",
    "eigen": "/usr/include/eigen3",
    "googletest": "/usr",
    "json": "/usr",
    "pcre2": "/usr",
    "sentencepiece": "/usr",
    "sodium": "/usr",
    "utf8proc": "/usr",
    "xxhash": "/usr",
    "zlib": "/usr",
    "zstd": "/usr",
}

# Libraries that are found on the machine, or replaced by empty stand-ins; and the King James Bible, the
# text that `bazel run //train` trains on by default.
_FOUND = {
    "cuda": cuda_configure,
    "kjv": kjv_text,
    "mpi": mpi_configure,
}

def declare_libraries(declared):
    """Declares the repositories whose names are not in `declared`."""
    for name, path in _DEBIAN.items():
        if name not in declared:
            system_repository(name = name, path = path, build_file = Label("//third_party:%s.BUILD" % name))
    for name, rule in _FOUND.items():
        if name not in declared:
            rule(name = name)

def burst_repositories():
    """Declares the repositories of a WORKSPACE, except those that it has declared already."""
    declared = native.existing_rules()
    offline_repositories(declared)
    declare_libraries(declared)
