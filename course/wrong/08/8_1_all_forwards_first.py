# refused: This is GPipe
def one_f_one_b(rank, stages, microbatches):
    return [(action, number) for action in "FB" for number in range(microbatches)]
