"""Bounded, a cache that drops the entry that was used longest ago."""

import threading
from collections import OrderedDict


_LEAST = 8  # a model's layers call with a few masks in turns, each of which may be large


class Bounded:
    """A cache whose entries weigh at most `limit` together, or which has at most _LEAST entries.

    Where weights are bytes, they are estimates. The calls of get and put alone decide which entries go, so
    ranks which make the same calls drop the same entries."""

    def __init__(self, limit):
        self._limit, self._total = limit, 0
        self._entries, self._lock = OrderedDict(), threading.Lock()

    def __len__(self):
        return len(self._entries)

    def get(self, key):
        """Returns the value, or None. The entry is now the one used last."""
        found = self._entries.get(key)
        if found is None:
            return None
        try:
            self._entries.move_to_end(key)
        except KeyError:  # another thread has dropped it meanwhile
            pass
        return found[0]

    def peek(self, key):
        """Returns the value, or None, without using the entry."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def put(self, key, value, weight=1):
        """Keeps a value, which takes the place of one with the same key."""
        dropped = []  # destroyed without the lock
        with self._lock:
            if key in self._entries:
                dropped.append(self._remove(key))
            self._entries[key] = (value, weight)
            self._total += weight
            while self._total > self._limit and len(self._entries) > _LEAST:
                dropped.append(self._remove(next(iter(self._entries))))
        return value

    def _remove(self, key):
        value, weight = self._entries.pop(key)
        self._total -= weight
        return value
