# refused: A step is skipped
from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
    losses = resumed.extra if resumed else []
    for step in range(resumed.step + 1 if resumed else 0, steps):
        checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)
        losses.append(one_step(step))
    return losses
