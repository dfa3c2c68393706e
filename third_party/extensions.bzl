"""The extension of MODULE.bazel that declares the libraries of repositories.bzl."""

load("//third_party:repositories.bzl", "declare_libraries")

def _impl(_ctx):
    declare_libraries(declared = [])

libraries = module_extension(implementation = _impl)
