# refused: Adam keeps two
def states_bytes(parameters, ranks, stage):
    share = -(-parameters // ranks)
    kept = [share if stage >= first else parameters for first in (1, 2, 3)]
    return 4 * sum(kept)
