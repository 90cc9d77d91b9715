# refused: starts from scratch
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    losses = []
    for step in range(steps):
        losses.append(one_step(step))
        checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)
    return losses
