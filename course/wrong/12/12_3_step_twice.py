# refused: A step is done twice
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
    losses = resumed.extra[:-1] if resumed else []
    for step in range(resumed.step if resumed else 0, steps):
        losses.append(one_step(step))
        checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)
    return losses
