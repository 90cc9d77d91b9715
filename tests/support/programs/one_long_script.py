"""
In the shape of karpathy/nanoGPT, train.py: configuration as globals, DDP only under torchrun, gradient
accumulation, and a `while True` that breaks.
"""

import math
import os
import time
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
# I/O
eval_interval = 2
log_interval = 1
# data
gradient_accumulation_steps = 4  # used to simulate larger batch sizes
batch_size = 6
block_size = 8
# adamw optimizer
learning_rate = 1e-2  # max learning rate
max_iters = 4
warmup_iters = 2
min_lr = 1e-3
# DDP settings
backend = "gloo"
device = "cpu"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
config = {k: globals()[k] for k in config_keys}  # will be useful for logging
# -----------------------------------------------------------------------------

# various inits, derived attributes, I/O setup
ddp = int(os.environ.get("RANK", "-1")) != -1  # is this a ddp run?
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    seed_offset = ddp_rank  # each process gets a different seed
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    seed_offset = 0
    ddp_rank, ddp_world_size = 0, 1
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext()

data = torch.randint(0, 16, (400,), generator=torch.Generator().manual_seed(0))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


iter_num = 0
model = torch.nn.Sequential(torch.nn.Embedding(16, 12), torch.nn.GELU(), torch.nn.Linear(12, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))

# wrap model into DDP container
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(3)
    for k in range(3):
        X, Y = get_batch()
        losses[k] = torch.nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten()).item()
    model.train()
    return losses.mean()


# learning rate decay scheduler (cosine with warmup)
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters + 2 - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


# training loop
X, Y = get_batch()  # fetch the very first batch
t0 = time.time()
while True:
    # determine and set the learning rate for this iteration
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        print(f"rank {ddp_rank} step {iter_num} val loss {estimate_loss().item()!r}")

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits = model(X)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), Y.flatten()) / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        print(f"rank {ddp_rank} iter {iter_num} loss {loss.item()!r}")
    iter_num += 1

    # termination conditions
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
