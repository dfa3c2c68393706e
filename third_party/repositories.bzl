"""The libraries that Burst needs, for its own WORKSPACE and for workspaces that depend on it:

    local_repository(name = "burst", path = "...")
    load("@burst//third_party:repositories.bzl", "burst_repositories")
    burst_repositories()
"""

load("//third_party/bazel:offline.bzl", "offline_repositories")
load("//third_party/cuda:configure.bzl", "cuda_configure")
load("//third_party/mpi:configure.bzl", "mpi_configure")

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
}

def burst_repositories():
    """Declares the repositories, except those that the workspace has declared already."""

    # Repositories that Bazel itself loads, made from local files without the network.
    if not native.existing_rule("rules_cc"):
        offline_repositories()

    for name, path in _DEBIAN.items():
        if not native.existing_rule(name):
            native.new_local_repository(
                name = name,
                build_file = str(Label("//third_party:%s.BUILD" % name)),
                path = path,
            )

    # Libraries that are found on the machine, or replaced by empty stand-ins.
    if not native.existing_rule("cuda"):
        cuda_configure(name = "cuda")
    if not native.existing_rule("mpi"):
        mpi_configure(name = "mpi")
