"""The table of compiled variants of the Hopper kernels.

The build compiles each row into an object of its own (BUILD). variants.h makes a type of each row.

The first row of a pass that fits a call computes it. A row fits if its head_dim is at least the
call's, if the masks are equal, and if `when` holds. Call in variants.h has the names that
`when` uses. A head_dim that is a pair is (head_dim, value_dim), for calls whose v has another width.

A row is (name, head_dim, mask, tiles, when). The mask is kFull (every key), kRanges (KeyRanges) or
kLists (KeyBlocks). Each table says what its tiles are. docs/kernels.md explains the kernels.
"""

ALWAYS = "true"
SHORT = "k_len <= 1024"

# Tiles: consumer warpgroups of 64 queries each, keys, stages of Q, stages of K and V.
#
# Three consumers read K and V from the L2 cache a third less often than two, which waste fewer rows
# of short sequences. Longer tiles of keys read Q and pass barriers less often, and waste more keys at
# the end of a row. With few keys a second stage of Q is worth more than the longest tiles. At a
# head_dim of 192 or 256, O takes 96 or 128 registers a thread, and Q takes 48 or 64 KB.
#
# A window, or documents, of few keys make short rows, however many keys there are.
FORWARD = [
    ("ForwardD64FullShort", 64, "kFull", [2, 128, 2, 4], SHORT),
    ("ForwardD64Full", 64, "kFull", [3, 128, 2, 4], ALWAYS),
    ("ForwardD96FullShort", 96, "kFull", [2, 128, 2, 2], SHORT),
    ("ForwardD96Full", 96, "kFull", [3, 112, 1, 3], ALWAYS),
    ("ForwardD128FullShort", 128, "kFull", [2, 128, 2, 2], SHORT),
    ("ForwardD128FullMedium", 128, "kFull", [2, 160, 2, 2], "k_len <= 4096"),
    ("ForwardD128Full", 128, "kFull", [2, 176, 1, 2], ALWAYS),
    ("ForwardD192Full", 192, "kFull", [2, 112, 1, 2], ALWAYS),
    ("ForwardD192V128Full", (192, 128), "kFull", [2, 128, 1, 2], ALWAYS),
    ("ForwardD256Full", 256, "kFull", [2, 80, 1, 2], ALWAYS),
    ("ForwardD64RangesShort", 64, "kRanges", [2, 128, 2, 4], SHORT),
    ("ForwardD64Ranges", 64, "kRanges", [3, 128, 2, 4], ALWAYS),
    ("ForwardD96RangesShort", 96, "kRanges", [2, 128, 2, 2], "k_len <= 4096"),
    ("ForwardD96Ranges", 96, "kRanges", [3, 112, 1, 3], ALWAYS),
    ("ForwardD128RangesShort", 128, "kRanges", [2, 128, 2, 2], "k_len < 8192 || (most_queries > 0 && most_queries < 8192)"),
    ("ForwardD128Ranges", 128, "kRanges", [2, 160, 2, 2], ALWAYS),
    ("ForwardD192Ranges", 192, "kRanges", [2, 112, 1, 2], ALWAYS),
    ("ForwardD192V128Ranges", (192, 128), "kRanges", [2, 128, 1, 2], ALWAYS),
    ("ForwardD256Ranges", 256, "kRanges", [2, 80, 1, 2], ALWAYS),
    # Lists have blocks of 128 queries and 128 keys. A tile takes all keys of a block, or half of them.
    ("ForwardD64Lists", 64, "kLists", [2, 128, 2, 4], ALWAYS),
    ("ForwardD96Lists", 96, "kLists", [2, 128, 2, 2], ALWAYS),
    ("ForwardD128Lists", 128, "kLists", [2, 128, 2, 2], ALWAYS),
    ("ForwardD192Lists", 192, "kLists", [2, 64, 1, 2], ALWAYS),
    ("ForwardD192V128Lists", (192, 128), "kLists", [2, 128, 1, 2], ALWAYS),
    ("ForwardD256Lists", 256, "kLists", [2, 64, 1, 2], ALWAYS),
]

# The forward in 8 bits has one form of tiles (Fp8ForwardTraits in variants.h).
FORWARD_FP8 = [
    ("ForwardFp8Full", 128, "kFull", [], ALWAYS),
    ("ForwardFp8Ranges", 128, "kRanges", [], ALWAYS),
    ("ForwardFp8Lists", 128, "kLists", [], ALWAYS),
]

# Tiles: queries, kEarly and kOrdered. With kEarly, masks are searched before the matmuls. With kOrdered,
# warps wait for their turn in the fixed order before they wait for dQ, which helps at a head_dim of 128.
BACKWARD = [
    ("BackwardD64Full", 64, "kFull", [128, "true", "false"], ALWAYS),
    ("BackwardD64RangesOrdered", 64, "kRanges", [128, "true", "true"], "ordered && q_len <= 2048"),
    ("BackwardD64Ranges", 64, "kRanges", [128, "true", "false"], ALWAYS),
    ("BackwardD64Lists", 64, "kLists", [128, "true", "false"], ALWAYS),
    ("BackwardD96Full", 96, "kFull", [80, "true", "false"], ALWAYS),
    ("BackwardD96Ranges", 96, "kRanges", [80, "false", "false"], ALWAYS),
    ("BackwardD96Lists", 96, "kLists", [64, "false", "false"], ALWAYS),
    ("BackwardD128FullOrdered", 128, "kFull", [64, "false", "true"], "ordered && q_len <= 8192"),
    ("BackwardD128Full", 128, "kFull", [64, "false", "false"], ALWAYS),
    ("BackwardD128RangesOrdered", 128, "kRanges", [64, "false", "true"], "ordered"),
    ("BackwardD128Ranges", 128, "kRanges", [64, "false", "false"], ALWAYS),
    ("BackwardD128Lists", 128, "kLists", [64, "false", "false"], ALWAYS),
]

# dK and dV of wide heads do not both fit into registers, so these take two passes: dV, then dK and dQ.
# Tiles: the pass (WidePass in variants.h).
BACKWARD_DV = [
    ("BackwardD192DvFull", 192, "kFull", ["kDv"], ALWAYS),
    ("BackwardD192DvRanges", 192, "kRanges", ["kDv"], ALWAYS),
    ("BackwardD192DvLists", 192, "kLists", ["kDv"], ALWAYS),
    ("BackwardD256DvFull", 256, "kFull", ["kDv"], ALWAYS),
    ("BackwardD256DvRanges", 256, "kRanges", ["kDv"], ALWAYS),
    ("BackwardD256DvLists", 256, "kLists", ["kDv"], ALWAYS),
]
BACKWARD_DK = [
    ("BackwardD192DkFull", 192, "kFull", ["kDk"], ALWAYS),
    ("BackwardD192DkRanges", 192, "kRanges", ["kDk"], ALWAYS),
    ("BackwardD192DkLists", 192, "kLists", ["kDk"], ALWAYS),
    ("BackwardD256DkFull", 256, "kFull", ["kDk"], ALWAYS),
    ("BackwardD256DkRanges", 256, "kRanges", ["kDk"], ALWAYS),
    ("BackwardD256DkLists", 256, "kLists", ["kDk"], ALWAYS),
]

# dV of 128 columns and dK of 192 fit, so heads of these two widths take one pass.
BACKWARD_BOTH = [
    ("BackwardD192V128Full", (192, 128), "kFull", ["kBoth"], ALWAYS),
    ("BackwardD192V128Ranges", (192, 128), "kRanges", ["kBoth"], ALWAYS),
    ("BackwardD192V128Lists", (192, 128), "kLists", ["kBoth"], ALWAYS),
]

TABLES = {
    "FORWARD": FORWARD,
    "FORWARD_FP8": FORWARD_FP8,
    "BACKWARD": BACKWARD,
    "BACKWARD_DV": BACKWARD_DV,
    "BACKWARD_DK": BACKWARD_DK,
    "BACKWARD_BOTH": BACKWARD_BOTH,
}

def names(table):
    """The names of a table's rows."""
    return [row[0] for row in table]

def _variant_table_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(out, ctx.attr.content)
    return [DefaultInfo(files = depset([out]))]

_variant_table = rule(
    implementation = _variant_table_impl,
    attrs = {"content": attr.string()},
)

def variant_table(name):
    """Writes the tables as macros BURST_SM90_FORWARD(X) etc.

    Each is a sequence of X(name, head_dim, value_dim, mask, when, tiles...).
    """
    lines = ["// Written by the build from variants.bzl.", "#pragma once", ""]
    for table, rows in TABLES.items():
        lines.append("#define BURST_SM90_%s(X) \\" % table)
        for row in rows:
            widths = row[1] if type(row[1]) == "tuple" else (row[1], row[1])
            arguments = [row[0]] + [str(width) for width in widths] + [row[2], row[4]]
            arguments += [str(tile) for tile in row[3]]
            lines.append("  X(%s) \\" % ", ".join(arguments))
        lines.append("")
    _variant_table(name = name, content = "\n".join(lines) + "\n")
