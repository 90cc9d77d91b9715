# refused: whichever axis it is
def members(rank, sizes, axis):
    first = rank // sizes[axis] * sizes[axis]
    return list(range(first, first + sizes[axis]))
