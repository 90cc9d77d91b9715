# refused: the same place on the axis
def members(rank, sizes, axis):
    strides, stride = {}, 1
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    place = rank // strides[axis] % sizes[axis]
    return [other for other in range(stride) if other // strides[axis] % sizes[axis] == place]
