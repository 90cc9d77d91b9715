# refused: The rank itself is missing
def members(rank, sizes, axis):
    stride = 1
    for name in reversed(sizes):
        if name == axis:
            break
        stride *= sizes[name]
    first = rank - rank // stride % sizes[axis] * stride
    return [first + place * stride for place in range(sizes[axis]) if first + place * stride != rank]
