# refused: numbers, not bytes
def states_bytes(parameters, ranks, stage):
    share = -(-parameters // ranks)
    return sum(share if stage >= first else parameters for first in (1, 1, 2, 3))
