"""Tests and what they share. foo_test is compiled from foo_test.cc, a library foo has foo.h.

All depend on COMMON (//:defs.bzl) and GoogleTest.
"""

load("@rules_cc//cc:cc_test.bzl", "cc_test")
load("//:defs.bzl", "COMMON", "burst_library")
load("@mpi//:defs.bzl", "MPIRUN")
load("//third_party/cuda:defs.bzl", "if_cuda")

def unit_test(name, deps = [], size = "small", gtest = "@googletest//:gtest_main", tags = None, **kwargs):
    """A GoogleTest program. One that is not small has two cores."""
    cc_test(
        name = name,
        size = size,
        srcs = [name + ".cc"],
        tags = tags or ([] if size == "small" else ["cpu:2"]),
        deps = COMMON + deps + [gtest],
        **kwargs
    )

def program_test(name, programs, size = "medium", mpirun = False, data = [], deps = [], **kwargs):
    """A unit_test that starts programs. mpirun: BURST_MPIRUN is its path, or "" without MPI."""
    unit_test(
        name = name,
        size = size,
        data = data + programs,
        local_defines = ["BURST_MPIRUN=\\\"%s\\\"" % MPIRUN] if mpirun else [],
        deps = deps + [
            "//tests/testing:sanitizers",
            "//tests/testing:subprocess",
            "@json",
        ],
        **kwargs
    )

def gpu_test(name, deps, size = "small", srcs = None, gtest = "@googletest//:gtest_main", small_gpu = False, **kwargs):
    """A unit_test whose kTestDevice (test_device.h) is a GPU: run with --config=cuda only.

    small_gpu: another test, foo_small_gpu_test, runs as on a GPU with 99 KB of shared memory a
    thread block.
    """
    tests = {name: []}
    if small_gpu:
        tests[name.replace("_cuda_test", "_test").replace("_test", "_small_gpu_test")] = [
            "//tests/testing:small_gpu",
        ]
    for test, more in tests.items():
        cc_test(
            name = test,
            size = size,
            srcs = srcs or [name + ".cc"],
            local_defines = ["BURST_TEST_CUDA"],
            tags = ["exclusive", "gpu"],
            target_compatible_with = if_cuda([], ["//third_party/cuda:absent"]),
            deps = COMMON + deps + more + [gtest],
            **kwargs
        )

def device_test(name, deps, size = "small", gtest = "@googletest//:gtest_main", small_gpu = False, **cpu):
    """foo_test on the CPU, with the attributes `cpu`, and foo_cuda_test from the same source."""
    unit_test(name = name, size = size, deps = deps, gtest = gtest, **cpu)
    gpu_test(
        name = name.replace("_test", "_cuda_test"),
        size = size,
        srcs = [name + ".cc"],
        deps = deps,
        gtest = gtest,
        small_gpu = small_gpu,
    )

def test_library(name, deps = [], **kwargs):
    """What tests share; header-only unless it has srcs."""
    burst_library(
        name = name,
        testonly = True,
        hdrs = [name + ".h"],
        deps = deps + ["@googletest//:gtest"],
        **kwargs
    )
