"""system_repository: a repository of files that are on this machine already."""

def _impl(ctx):
    root = ctx.path(ctx.attr.path)
    if not root.exists:
        fail("%s: %s must exist; run third_party/install.sh" % (ctx.name, root))
    written = ["BUILD", "BUILD.bazel", "WORKSPACE"] if ctx.attr.build_file else []
    for entry in root.readdir():
        if entry.basename not in written:
            ctx.symlink(entry, entry.basename)
    if ctx.attr.build_file:
        ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
        ctx.symlink(ctx.attr.build_file, "BUILD")

# Without a build_file the folder must be a Bazel repository itself.
system_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "build_file": attr.label(),
        "path": attr.string(mandatory = True),
    },
    local = True,
)
