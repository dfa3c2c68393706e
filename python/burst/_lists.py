"""Lists of numbers from what callers give: lists, tuples, tensors, arrays, iterators."""


def list_of(values):
    """Returns a list of the elements of a list, a tuple, a tensor or an array, as Python's numbers."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def nested(values):
    """Returns lists of lists down to numbers and texts, from iterables of any depth. An iterator is read once."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [value if isinstance(value, (int, str)) or not (hasattr(value, "tolist") or hasattr(value, "__iter__"))
            else nested(value) for value in values]
