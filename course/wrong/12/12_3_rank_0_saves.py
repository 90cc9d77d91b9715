# refused: Saving and loading are meetings
import torch.distributed as dist

from axon_nb.parallel import Checkpoints


def train(model, optimizer, one_step, folder, steps):
    checkpoints = Checkpoints(folder)
    losses = []
    for step in range(steps):
        losses.append(one_step(step))
        if dist.get_rank() == 0:
            checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)
    return losses
