# refused: Adam's moments did not
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    resumed = checkpoints.load_latest(model=model)
    losses = resumed.extra if resumed else []
    for step in range(len(losses), steps):
        losses.append(one_step(step))
        checkpoints.save(step, model=model, extra=losses)
    return losses
