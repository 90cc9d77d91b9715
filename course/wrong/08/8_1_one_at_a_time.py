# refused: all the way there and back
def one_f_one_b(rank, stages, microbatches):
    return [(action, number) for number in range(microbatches) for action in "FB"]
