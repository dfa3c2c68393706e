"""Lists of numbers from what callers give: lists, tuples, tensors, arrays, iterators."""


def list_of(values):
    """Returns a list of the elements of a list, a tuple, a tensor or an array, as Python's numbers."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def nested(values):
    """Returns a list of numbers, texts and such lists, from iterables of any depth. An iterator is read once.

    Lists and tuples that begin with an int stay as they are, because masks have thousands of them."""
    return [value if _is_plain(value) else value.tolist() if hasattr(value, "tolist") else nested(value)
            for value in list_of(values)]


def _is_plain(value):
    if type(value) in (list, tuple):
        return not value or type(value[0]) is int
    return isinstance(value, (int, str)) or not (hasattr(value, "tolist") or hasattr(value, "__iter__"))
