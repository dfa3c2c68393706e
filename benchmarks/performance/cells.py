"""How the tables write numbers."""

NONE = "-"


def number(value, digits=0):
    return NONE if value is None else "{:,.{}f}".format(value, digits)


def ratio(ours, peer):
    return NONE if ours is None or peer is None else "%.2f" % (ours / peer)
