"""Fuzz targets: NAME_fuzz.cc becomes NAME_replay_test and, with --config=fuzz, NAME_fuzz."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")

def fuzz_target(name, deps, mutations = 2000):
    """A target of fuzz_target.h with its corpus in corpus/NAME."""
    cc_library(
        name = name,
        testonly = True,
        srcs = [name + "_fuzz.cc"],
        deps = deps + [
            ":fuzz_input",
            ":fuzz_target",
            "//burst/base:check",
        ],
    )
    cc_test(
        name = name + "_replay_test",
        size = "small",
        srcs = ["replay_test.cc"],
        args = ["tests/fuzz/corpus/" + name, str(mutations)],
        data = native.glob(["corpus/" + name + "/*"]),
        deps = [
            name,
            ":fuzz_target",
            "@googletest//:gtest",
        ],
    )
    cc_binary(
        name = name + "_fuzz",
        testonly = True,
        srcs = ["libfuzzer.cc"],
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = [
            name,
            ":fuzz_target",
        ],
    )
