"""python_test: foo_test.py, run by run.sh."""

load("@rules_shell//shell:sh_test.bzl", "sh_test")

def python_test(name, size = "medium", data = []):
    sh_test(
        name = name,
        size = size,
        srcs = ["run.sh"],
        args = [name + ".py"],
        data = data + [
            "harness.py",
            name + ".py",
            "//burst/c:libburst.so",
            "//python:package",
        ],
        tags = ["cpu:2"],
    )
