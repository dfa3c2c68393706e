"""@mpi: the Open MPI found on this machine, or an empty stand-in.

mpicc itself says what to compile and link with; libmpi is a shared library everywhere.
--repo_env=BURST_MPI=0 builds without MPI, BURST_MPI=1 insists on it.
"""

_BUILD = """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "mpi",
    hdrs = glob(["include/**/*.h"]),
    defines = {defines},
    includes = {includes},
    linkopts = {linkopts},
)
"""

_DEFS = """
MPIRUN = {mpirun}  # its path, or "" without MPI

def if_mpi(then, otherwise = []):
    return then if MPIRUN else otherwise
"""

def _words(text):
    return [word for word in text.strip().split(" ") if word]

def _find(ctx):
    """Returns the folder of mpi.h, the link options and mpirun; or why there is no MPI."""
    mpicc, mpirun = ctx.which("mpicc"), ctx.which("mpirun")
    if not mpicc or not mpirun:
        return None, "no mpicc and mpirun on the PATH"
    dirs = ctx.execute([mpicc, "--showme:incdirs"])
    link = ctx.execute([mpicc, "--showme:link"])
    if dirs.return_code != 0 or link.return_code != 0:
        return None, "%s is not Open MPI's" % mpicc
    headers = [d for d in _words(dirs.stdout) if ctx.path(d + "/mpi.h").exists]
    if not headers:
        return None, "no mpi.h in %s" % dirs.stdout.strip()
    flags = [f for f in _words(link.stdout) if f[:2] in ["-l", "-L"] or f.startswith("-Wl,")]
    return struct(headers = headers[0], linkopts = flags, mpirun = str(mpirun)), None

def _impl(ctx):
    wanted = ctx.os.environ.get("BURST_MPI", "auto")
    mpi, why = (None, None) if wanted == "0" else _find(ctx)
    if wanted == "1" and not mpi:
        fail("BURST_MPI=1, but " + why)
    if mpi:
        ctx.symlink(mpi.headers, "include")
    ctx.file("BUILD", _BUILD.format(
        # Not the C++ bindings, which MPI-3 removed.
        defines = repr(["OMPI_SKIP_MPICXX"] if mpi else []),
        includes = repr(["include"] if mpi else []),
        linkopts = repr(mpi.linkopts if mpi else []),
    ))
    ctx.file("defs.bzl", _DEFS.format(mpirun = repr(mpi.mpirun if mpi else "")))

mpi_configure = repository_rule(
    implementation = _impl,
    environ = ["BURST_MPI", "PATH"],
    local = True,
    configure = True,
)
