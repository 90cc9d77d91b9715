# refused: Some microbatches never come back
def one_f_one_b(rank, stages, microbatches):
    ahead = min(stages - rank, microbatches)
    order = [("F", number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        order += [("B", number - ahead), ("F", number)]
    return order
