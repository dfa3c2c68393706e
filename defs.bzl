"""burst_library and burst_binary: the libraries and programs of this repository."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")

# What nearly everything depends on.
COMMON = [
    "//burst/base:check",
    "//burst/base:status",
    "@absl//:status",
    "@absl//:strings",
]

def burst_library(name, srcs = None, hdrs = None, deps = [], **kwargs):
    """A library of NAME.h and, if there is one, NAME.cc, or of srcs and hdrs. It depends on COMMON.

    burst/base, the lowest layer, depends on COMMON's other repositories only.
    """
    own = native.package_name() == "burst/base"
    common = [dep for dep in COMMON if not (own and dep.startswith("//"))]
    if srcs == None and hdrs == None:
        srcs, hdrs = native.glob([name + ".cc"]), native.glob([name + ".h"])
    cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        deps = common + deps,
        **kwargs
    )

def burst_binary(name, srcs = None, deps = [], **kwargs):
    """A program of NAME.cc or of srcs. It depends on COMMON."""
    cc_binary(name = name, srcs = srcs or [name + ".cc"], deps = COMMON + deps, **kwargs)
