"""Tests that run on GPUs: built everywhere, run by bazel test --config=cuda or from the bundle."""

load("//third_party/cuda:defs.bzl", "if_cuda")

def gpu_test(name, **kwargs):
    """A cc_test whose kTestDevice (test_device.h) is a GPU."""
    native.cc_test(
        name = name,
        local_defines = ["BURST_TEST_CUDA"],
        tags = ["exclusive", "gpu"],
        target_compatible_with = if_cuda([], ["//third_party/cuda:absent"]),
        **kwargs
    )

def device_test(name, srcs, deps, size, **cpu):
    """foo_test on the CPU, with the attributes `cpu`, and foo_cuda_test from the same source."""
    native.cc_test(name = name, size = size, srcs = srcs, deps = deps, **cpu)
    gpu_test(name = name.replace("_test", "_cuda_test"), size = size, srcs = srcs, deps = deps)
