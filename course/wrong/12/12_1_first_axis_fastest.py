# refused: the first axis varies fastest
def members(rank, sizes, axis):
    stride = 1
    for name in sizes:
        if name == axis:
            break
        stride *= sizes[name]
    first = rank - rank // stride % sizes[axis] * stride
    return [first + place * stride for place in range(sizes[axis])]
