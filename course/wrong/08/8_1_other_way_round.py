# refused: the wrong way round
def one_f_one_b(rank, stages, microbatches):
    ahead = min(rank + 1, microbatches)
    order = [("F", number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(("B", number))
        if ahead + number < microbatches:
            order.append(("F", ahead + number))
    return order
