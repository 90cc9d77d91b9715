# refused: The losses from before the cut are gone
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
    losses = []
    for step in range(resumed.step + 1 if resumed else 0, steps):
        losses.append(one_step(step))
        checkpoints.save(step, model=model, optimizer=optimizer)
    return losses
