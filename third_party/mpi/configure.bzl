"""@mpi: the Open MPI found on this machine, or an empty stand-in.

mpicxx itself says what to compile and link with.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])
cc_library(
    name = "mpi",
    hdrs = glob(["include/**/*.h"]),
    includes = {includes},
    linkopts = {linkopts},
)
"""

def _impl(ctx):
    mpicxx = ctx.which("mpicxx")
    includes, linkopts = [], []
    if mpicxx:
        flags = ctx.execute([mpicxx, "--showme:incdirs"])
        dirs = flags.stdout.split() if flags.return_code == 0 else []
        found = [d for d in dirs if ctx.path(d + "/mpi.h").exists]
        link = ctx.execute([mpicxx, "--showme:link"])
        if found and link.return_code == 0:
            ctx.symlink(found[0], "include")
            includes = ["include"]
            linkopts = [f for f in link.stdout.split() if f.startswith("-l") or f.startswith("-L") or f.startswith("-Wl")]
    ctx.file("BUILD", _BUILD.format(includes = repr(includes), linkopts = repr(linkopts)))
    ctx.file("defs.bzl", """HAVE_MPI = {have}
def if_mpi(then, otherwise = []):
    return then if HAVE_MPI else otherwise
""".format(have = repr(bool(linkopts))))

mpi_configure = repository_rule(
    implementation = _impl,
    environ = ["PATH"],
    local = True,
    configure = True,
)
