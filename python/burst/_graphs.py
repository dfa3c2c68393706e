"""What compiled graphs (torch.compile) need to know of Burst's functions."""


def constant(function):
    """Makes a graph call a function while it is traced, and take the result as a constant.

    torch.compiler.assume_constant_result does so, too, but imports torch's compiler."""
    function._dynamo_marked_constant = True
    return function
