"""Masks as intervals of keys, and as attention()'s arguments: documents and a window, or slices.

`low` and `high` are int64 tensors [rows, n] on the CPU, or [n] of one row. Query i sees the keys from
low[i] to high[i] - 1, and none where low[i] >= high[i]."""

import torch

_MOST_SLICES = 100_000  # the most slices of a batch; a mask that needs more is unstructured
_MOST_INTERVALS = 64  # the most intervals of keys that one query sees


def runs(labels):
    """Returns (begin, end) of the run of equal labels around each token: int64 tensors like `labels`, [rows, n].

    Raises ValueError if a label comes back after another one."""
    rows, n = labels.shape
    at = torch.arange(n, device="cpu").expand(rows, n)
    first = torch.ones(rows, n, dtype=torch.bool, device="cpu")
    first[:, 1:] = labels[:, 1:] != labels[:, :-1]
    for row in range(rows):
        if len(labels[row].unique()) != int(first[row].sum()):
            raise ValueError("a label comes back")
    begin = torch.where(first, at, 0).cummax(1).values
    last = first.roll(-1, 1)
    last[:, -1:] = True
    end = torch.where(last, at + 1, n).flip(1).cummin(1).values.flip(1)
    return begin, end


def union(a, b):
    """Returns the union of two pairs (low, high). Raises ValueError if it is not one interval."""
    no_a, no_b = a[0] >= a[1], b[0] >= b[1]
    apart = ~no_a & ~no_b & ((b[0] > a[1]) | (a[0] > b[1]))
    if bool(apart.any()):
        raise ValueError("two intervals")
    low = torch.where(no_a, b[0], torch.where(no_b, a[0], torch.minimum(a[0], b[0])))
    high = torch.where(no_a, b[1], torch.where(no_b, a[1], torch.maximum(a[1], b[1])))
    return low, high


def of_values(shown):
    """Returns (low, high), each [the most intervals of a query, queries], of a bool tensor [queries, keys]."""
    queries = shown.shape[0]
    padded = torch.nn.functional.pad(shown, (1, 1))
    rise, fall = padded[:, 1:] & ~padded[:, :-1], padded[:, :-1] & ~padded[:, 1:]
    (query, low), (_, high) = rise.cpu().nonzero().T, fall.cpu().nonzero().T
    counts = torch.bincount(query, minlength=queries)
    most = max(1, int(counts.max()) if queries else 1)
    if most > _MOST_INTERVALS:
        raise ValueError("a query sees %d pieces of the keys" % most)
    which = torch.arange(len(query), device="cpu") - (counts.cumsum(0) - counts)[query]
    lows, highs = (torch.zeros(most, queries, dtype=torch.int64, device="cpu") for _ in range(2))
    lows[which, query], highs[which, query] = low, high
    return lows, highs


def keep_keys(low, high, kept):
    """Returns (low, high), each [pieces, n], of one row whose keys are seen only where `kept`, [n], is true."""
    begins, ends = of_values(kept[None])
    return torch.maximum(low[None], begins), torch.minimum(high[None], ends)


def _same(values):
    return len(values) == 0 or bool((values == values[0]).all())


def simple(low, high):
    """Returns (causal, window, rows of document starts or None) of a mask that needs no slices, or None for another
    mask."""
    rows, n = low.shape
    if n == 0 or bool((low >= high).any()):
        return None
    at = torch.arange(n, device="cpu")
    back, ahead = at - low, high - 1 - at
    if bool((back < 0).any() | (ahead < 0).any()):
        return None
    causal = not bool(ahead.any())
    starts = back == 0
    if causal and n > 1 and bool(starts.all()):
        return True, 1, None
    begin = torch.where(starts, at, 0).cummax(1).values
    end = torch.where(starts.roll(-1, 1), at + 1, n).flip(1).cummin(1).values.flip(1)
    end[:, -1] = n
    if bool((low < begin).any()) or bool((high > end).any()):
        return None
    cut = [back[low > begin]] + ([] if causal else [ahead[high < end]])
    whole = [back[low == begin]] + ([] if causal else [ahead[high == end]])
    limits, others = torch.cat(cut), torch.cat(whole)
    if not _same(limits) or (len(limits) and bool((others > limits[0]).any())):
        return None
    window = int(limits[0]) + 1 if len(limits) else 0
    documents = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in starts)
    return causal, window, None if all(row == (0,) for row in documents) else documents


def _ramps(low, high):
    """Yields (first, last + 1, low slope, high slope) of runs of queries whose bounds stay or move by 1."""
    shown = low < high
    slopes = [bound[1:] - bound[:-1] for bound in (low, high)]
    fits = shown[1:] & shown[:-1]
    for slope in slopes:
        fits &= (slope == 0) | (slope == 1)
    kinds = torch.where(fits, slopes[0] + 2 * slopes[1], -1)
    changes = (kinds[1:] != kinds[:-1]).nonzero()[:, 0] + 1
    bounds = [0, *changes.tolist(), len(kinds)] if len(kinds) else [0]
    begin = 0  # begin of the open run
    for first, end in zip(bounds, bounds[1:]):
        kind = int(kinds[first])
        if kind < 0:  # query `first` ends a run, those after it are alone
            yield begin, first + 1, *_kind_of(kinds, begin, first)
            for query in (shown[first + 1:end].nonzero()[:, 0] + first + 1).tolist():
                yield query, query + 1, 0, 0
            begin = end
        elif begin < first:
            yield begin, first + 1, *_kind_of(kinds, begin, first)
            begin = first + 1
    yield begin, len(low), *_kind_of(kinds, begin, len(low) - 1)


def _kind_of(kinds, begin, last):
    kind = int(kinds[begin]) if begin < last else 0
    return kind % 2, kind // 2


_NAMES = {(0, 0): "full", (0, 1): "causal", (1, 0): "inverse_causal", (1, 1): "band"}


def slices(low, high):
    """Returns the slices (q_begin, q_end, k_begin, k_end, kind) of one row, whose low and high are [pieces, n]."""
    found = []
    for lows, highs in zip(low, high):
        for begin, end, *slopes in _ramps(lows, highs):
            if begin < end and lows[begin] < highs[begin]:
                found.append((begin, end, int(lows[begin]), int(highs[end - 1]), _NAMES[tuple(slopes)]))
        if len(found) > _MOST_SLICES:
            raise ValueError("it takes more than %d slices" % _MOST_SLICES)
    return tuple(found)
