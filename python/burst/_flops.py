"""Formulas of the operators' work for torch.utils.flop_counter.FlopCounterMode.

They count as torch does for scaled_dot_product_attention: two products forward, five backward, causal masks in
full. Documents, windows and slices count as the pairs of tokens that they leave, divided evenly over the ranks."""

import torch
from torch.utils.flop_counter import register_flop_formula


def _keys_of_a_query(call, tokens, keys):
    """Returns the mean number of keys that one of `tokens` queries sees of `keys` keys; causal counts in full."""
    if call.error is not None or tokens == 0:
        return keys
    if call.slices is not None:
        rows = [sum((b - a) * (min(d, keys) - max(c, 0)) for a, b, c, d, _ in row) for row in call.slices]
    else:
        if call.pairs is not None:
            rows = [[(b - a, d - c) for a, b, c, d in zip(call.pairs[0], call.pairs[0][1:],
                                                          call.pairs[1], call.pairs[1][1:])]]
        else:
            bounds = [sorted({0, *row}) + [tokens] for row in call.documents or ((),)]
            rows = [[(b - a, b - a if not call.cross else keys) for a, b in zip(row, row[1:])] for row in bounds]
        most = call.window * (1 if call.causal else 2) - (not call.causal) if call.window else keys
        rows = [sum(queries * min(seen, most) for queries, seen in row) for row in rows]
    return sum(rows) / len(rows) / tokens


def register(operators, parse):
    """Registers the formulas of the operators. parse(text) returns the arguments of a call, with `size` and call(values)."""

    def count(q, k, v, text, values, products, products_of_values):
        parsed = parse(text)
        tokens, keys = q.shape[1] * parsed.size, k.shape[1] * parsed.size
        try:
            seen = _keys_of_a_query(parsed.call(values), tokens, keys)
        except RuntimeError:  # fake tensors have no values
            seen = keys
        pairs = q.shape[0] * q.shape[2] * q.shape[1] * seen
        return int(2 * pairs * (products * q.shape[3] + products_of_values * v.shape[3]))

    @register_flop_formula(operators.forward, get_raw=True)
    def forward(q, k, v, sinks, text, values, *_, **named):
        return count(q, k, v, text, values, 1, 1)

    @register_flop_formula(operators.backward, get_raw=True)
    def backward(q, k, v, sinks, out, lse, lengths, dout, dlse, text, values, *_, **named):
        return count(q, k, v, text, values, 3, 2)
