# refused: rounds a share down
def states_bytes(parameters, ranks, stage):
    share = parameters // ranks
    return 4 * sum(share if stage >= first else parameters for first in (1, 1, 2, 3))
