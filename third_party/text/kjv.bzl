"""@kjv: the King James Bible as one text file, written by Debian's bible-kjv package."""

def _impl(ctx):
    bible = ctx.which("bible")
    if not bible:
        fail("the `bible` program is missing: run third_party/install.sh")
    text = ctx.execute([bible, "-l70", "gen1:1-rev22:21"], timeout = 120)
    if text.return_code != 0 or len(text.stdout) < 1000000:
        fail("`bible` gave no text: " + text.stderr)
    ctx.file("kjv.txt", text.stdout)
    ctx.file("BUILD", 'exports_files(["kjv.txt"])\n')

kjv_text = repository_rule(
    implementation = _impl,
    environ = ["PATH"],
)
