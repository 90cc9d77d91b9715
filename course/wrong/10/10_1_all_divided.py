# refused: divides everything by the number of ranks
def states_bytes(parameters, ranks, stage):
    return 16 * parameters // ranks
