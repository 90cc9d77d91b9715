# refused: one forward further ahead
def one_f_one_b(rank, stages, microbatches):
    ahead = min(stages - rank, microbatches)
    order = [("F", number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(("F", ahead + number))
        order.append(("B", number))
    return order
