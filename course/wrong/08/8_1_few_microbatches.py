# refused: microbatches are numbered
def one_f_one_b(rank, stages, microbatches):
    ahead = stages - rank
    order = [("F", number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(("B", number))
        if ahead + number < microbatches:
            order.append(("F", ahead + number))
    return order
