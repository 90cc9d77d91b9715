# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The guide, run
#
# Many people start with the same guide to distributed training: one page per technique, with a class or a loop on each
# page. It reads well, but much of it does not run: `YourModel()`, a `pass`, three dots, a GPU for every line. This
# notebook is that guide from the first page to the last. Every example is a cell that runs, on four ranks of this
# computer and on real digits.
#
# What the guide left open is *completed* here, and its mistakes are *corrected*; a line above each cell says which.
# Most of the mistakes are silent: the loss goes down anyway. So most cells end with a comparison with one process.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# Every rank loads the 1,797 handwritten digits. `your_model()` and `train_dataset` are what the guide calls
# `YourModel()` and `YourDataset()`; `in_step` checks what matters after training on many ranks: whether they still have
# the same weights.

# %%
from importlib.util import find_spec

import axon_nb

if not find_spec("sklearn"):
    raise axon_nb.UsageError("This notebook needs scikit-learn. Run `%pip install scikit-learn`, then this cell again.")

# %%
# %%distributed
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from axon_nb.comm import broadcast
from axon_nb.parallel import DDP, reduce_metrics, save_on_main

torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0), device="cpu")
pixels = (torch.tensor(digits.data, dtype=torch.float32)[order] / 16).to(device)
labels = torch.tensor(digits.target)[order].to(device)
train_dataset = TensorDataset(pixels[:1440], labels[:1440])

shared = [tempfile.mkdtemp() if rank == 0 else None]  # a folder for all ranks
dist.broadcast_object_list(shared)
folder = Path(shared[0])


def your_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


@torch.no_grad()
def accuracy(model):
    """The share of the 357 test digits that a model classifies correctly; each rank tests a part of them."""
    mine = slice(1440 + rank, None, world_size)
    hits = (model(pixels[mine]).argmax(1) == labels[mine]).float()
    return reduce_metrics({"accuracy": hits.mean()}, weight=len(hits))["accuracy"]


@torch.no_grad()
def in_step(model):
    """Whether this rank's weights are those of rank 0, to the last bit."""
    own = torch.cat([parameter.flatten() for parameter in model.parameters()])
    return torch.equal(own, broadcast(own.clone()))


# %% [markdown]
# # Data parallelism
#
# ## PyTorch DistributedDataParallel (DDP)
#
# Every rank has the full model and sees a part of each batch; gradients are averaged while backward still runs.
#
# - Completed: a model, a data set, and four processes to run on. `mp.spawn` is not needed: the cell already runs on
#   every rank, and `init_process_group` attaches to the existing group.
# - Corrected: "average loss across all processes" was rank 0's own loss; `reduce_metrics` averages it over the samples
#   of all ranks.
# - Corrected: rank 0 saved while the others went on, so they could load a file that did not exist yet; `save_on_main`
#   returns on all ranks when the file is written, or raises the reason on all of them.
# - Corrected: `MASTER_ADDR` and `MASTER_PORT` were hard-coded with a fixed port, on which a second job would collide;
#   the launcher sets them.


# %%
# %%distributed
def setup():
    dist.init_process_group(backend="nccl" if device.type == "cuda" else "gloo")


def cleanup():
    dist.destroy_process_group()


def train_ddp(rank, world_size, model, train_dataset, epochs=5):
    setup()
    ddp_model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)
    sampler = DistributedSampler(train_dataset, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=3e-3)

    ddp_model.train()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another shuffle in every epoch, the same on all ranks
        epoch_loss = 0.0
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(data), target)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item() * len(data)
        avg_loss = reduce_metrics({"loss": epoch_loss / len(sampler)}, weight=len(sampler))["loss"]
        if rank == 0:
            print(f"epoch {epoch}, loss {avg_loss:.4f}")
        if (epoch + 1) % 5 == 0:
            checkpoint = {
                "epoch": epoch,
                "model_state_dict": ddp_model.module.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
            }
            save_on_main(checkpoint, folder / f"checkpoint_epoch_{epoch}.pt")
    cleanup()
    return ddp_model


ddp_model = train_ddp(rank, world_size, your_model(), train_dataset)
print(f"{accuracy(ddp_model):.1%} right; in step with rank 0: {in_step(ddp_model)}")

# %% [markdown]
# ### Using torchrun
#
# This is the same as a script. `World.init()` joins what the launcher has started, under `torchrun`, `mpirun` or
# `srun`; in a cell it attaches to the existing group.
#
# - Completed: "same as above"; `%distributed export train.py` writes such a script from the cells of a notebook.
# - Corrected: `.to(rank)` counts GPUs over all hosts; on the second host there is no GPU 4. It is the *local* rank.
#
# Start it with `torchrun --nproc-per-node=4 train_ddp.py`. On two hosts, run `torchrun --nproc-per-node=4 --nnodes=2
# --node-rank=0 --master-addr=node1 --master-port=29500 train_ddp.py` on `node1` and the same with `--node-rank=1` on
# the other host. Here it runs on two ranks of this computer:

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN_DDP = """
import torch
from sklearn.datasets import load_digits
from axon_nb.prelude import DDP, World, reduce_metrics

def main():
    world = World.init()
    device = torch.device("cuda", world.local_rank) if world.backend == "nccl" else torch.device("cpu")
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32, device=device)[world.rank() :: world.world_size()] / 16
    y = torch.tensor(digits.target, device=device)[world.rank() :: world.world_size()]
    model = DDP(torch.nn.Linear(64, 10).to(device), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    mean = reduce_metrics({"loss": loss.item()}, weight=len(x))["loss"]
    if world.is_main_process():
        print(f"{world.world_size()} ranks of torchrun, loss {mean:.3f}")
    world.close()

if __name__ == "__main__":
    main()
"""

with tempfile.TemporaryDirectory() as place:
    script = Path(place) / "train_ddp.py"
    script.write_text(TRAIN_DDP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    print(subprocess.run(torchrun, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# ## Gradient accumulation
#
# A batch that does not fit is computed in pieces, and the optimizer steps once for all of them.
#
# - Corrected: every piece averaged its gradients over ranks, which is four times the communication; `accumulating` is
#   DDP's `no_sync` around all pieces but the last.
# - Corrected: the remainder at an epoch's end (here 45 batches are 11 updates and one batch more) was added to the next
#   epoch's first update; `total` lets it complete its own update.

# %%
# %%distributed
from axon_nb.parallel import accumulating


class GradientAccumulationTrainer:
    """Training with gradient accumulation."""

    def __init__(self, model, optimizer, accumulation_steps=4):
        self.model = model
        self.optimizer = optimizer
        self.accumulation_steps = accumulation_steps

    def train_epoch(self, train_loader):
        self.model.train()
        self.optimizer.zero_grad()
        total_loss, seen = 0.0, 0
        for batch_idx, (data, target) in enumerate(train_loader):
            with accumulating(self.model, batch_idx, self.accumulation_steps, total=len(train_loader)) as last:
                loss = F.cross_entropy(self.model(data), target)
                (loss / self.accumulation_steps).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            total_loss, seen = total_loss + loss.item() * len(data), seen + len(data)
        return reduce_metrics({"loss": total_loss / seen}, weight=seen)["loss"]


sampler = DistributedSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=8, sampler=sampler)
model = DDP(your_model())
trainer = GradientAccumulationTrainer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
losses = [trainer.train_epoch(train_loader) for _ in range(3)]
if rank == 0:
    print("loss by epoch:", " ".join(f"{loss:.3f}" for loss in losses))

# %% [markdown]
# Four pieces of 8 should equal one batch of 32. Compare the gradients:

# %%
# %%distributed
at_once, in_pieces = DDP(your_model()), DDP(your_model())
x, y = pixels[rank:128:world_size], labels[rank:128:world_size]
F.cross_entropy(at_once(x), y).backward()
for step, (data, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
    with accumulating(in_pieces, step, 4):
        (F.cross_entropy(in_pieces(data), target) / 4).backward()
pairs = zip(at_once.parameters(), in_pieces.parameters(), strict=True)
print("the same gradients:", all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in pairs))

# %% [markdown]
# ## Mixed precision training
#
# Forward and backward in 16 bits, weights in 32.
#
# - Corrected: `torch.cuda.amp` is deprecated and supports GPUs only; `torch.autocast` and `torch.amp.GradScaler` take
#   the device.
# - Completed: bfloat16, which the guide mentions but does not show; it has the range of float32 and needs no scaler.


# %%
# %%distributed
class MixedPrecisionTrainer:
    """Training with mixed precision: float16 with a scaler, or bfloat16 without."""

    def __init__(self, model, optimizer, dtype=torch.float16):
        self.model = model
        self.optimizer = optimizer
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def train_epoch(self, train_loader):
        self.model.train()
        total_loss, seen = 0.0, 0
        for data, target in train_loader:
            self.optimizer.zero_grad()
            with torch.autocast(device.type, dtype=self.dtype):
                loss = F.cross_entropy(self.model(data).float(), target)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)  # skips the step where a gradient overflows, on all ranks alike
            self.scaler.update()
            total_loss, seen = total_loss + loss.item() * len(data), seen + len(data)
        return reduce_metrics({"loss": total_loss / seen}, weight=seen)["loss"]


train_loader = DataLoader(train_dataset, batch_size=32, sampler=sampler)
for dtype in (torch.float16, torch.bfloat16):
    model = DDP(your_model())
    trainer = MixedPrecisionTrainer(model, torch.optim.Adam(model.parameters(), lr=1e-3), dtype)
    for _ in range(5):
        loss = trainer.train_epoch(train_loader)
    right, together = accuracy(model), in_step(model)
    if rank == 0:
        print(f"{dtype}: {right:.1%} right, in step: {together}")

# %% [markdown]
# # Model parallelism
#
# ## Tensor parallelism (Megatron-LM)
#
# One layer runs on several ranks: a column-parallel layer computes some of the output features on each rank; a
# row-parallel layer takes some of the input features on each rank and sums the results.
#
# - Corrected: `all_gather` has no gradient, so neither the column layer nor anything before it was trained, and the
#   input of a row layer got only this rank's part of the gradient; ours get all of it.
# - Corrected: `out_features // world_size` silently drops the remainder; ours refuse sizes that do not divide evenly.
# - Corrected: with the same seed on all ranks, all drew the *same* shard; ours slice one full initialisation.
# - Corrected: only rank 0 added the row layer's bias, so the ranks continued with different activations.

# %%
# %%distributed
from axon_nb.parallel import ColumnParallelLinear, RowParallelLinear

torch.manual_seed(0)
first, second = nn.Linear(64, 128, device=device), nn.Linear(128, 10, device=device)  # the same on all ranks
column = ColumnParallelLinear.from_linear(first)  # or ColumnParallelLinear(64, 128)
row = RowParallelLinear.from_linear(second)
for name, layer, part in (("column", first, column), ("row", second, row)):
    print(f"{name}-parallel: {tuple(part.weight.shape)} of {tuple(layer.weight.shape)} on this rank")

cut, whole = row(column(pixels[:32]).relu()), second(first(pixels[:32]).relu())
F.cross_entropy(cut, labels[:32]).backward()
F.cross_entropy(whole, labels[:32]).backward()
mine = slice(32 * rank, 32 * rank + 32)
print("the same outputs:", torch.allclose(cut, whole, atol=1e-5))
print("the same gradients:", torch.allclose(column.weight.grad, first.weight.grad[mine], atol=1e-6))

# %% [markdown]
# ### A transformer
#
# The guide splits four matrices of a block and leaves attention out ("…"). Each rank computes attention for its own
# heads, without communication. Here a digit is read as a sequence of its eight rows of pixels.
#
# - Completed: the attention.
# - Corrected: residuals and norms were missing; without them such blocks do not train when stacked.
# - Corrected: one matrix for queries, keys and values, split in four, would give rank 0 most of the queries and no
#   values; each of the three is split separately, so that a rank has complete heads.
# - Corrected: every layer gathered its output and split it again; between a column and a row layer nothing needs to be
#   sent, so a block has two reductions in forward.


# %%
# %%distributed
class Transformer(nn.Module):
    """A block in one piece."""

    def __init__(self, d_model, nhead):
        super().__init__()
        self.head_size = d_model // nhead
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def heads(self, features):
        return features.unflatten(-1, (-1, self.head_size)).transpose(-3, -2)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (self.heads(project(h)) for project in (self.q_proj, self.k_proj, self.v_proj))
        attn_output = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out_proj(attn_output.transpose(-3, -2).flatten(-2))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class TensorParallelTransformer(Transformer):
    """Transformer with tensor parallelism: the same forward, on this rank's heads and features."""

    def __init__(self, d_model, nhead):
        super().__init__(d_model, nhead)
        for name in ("q_proj", "k_proj", "v_proj", "fc1"):
            setattr(self, name, ColumnParallelLinear.from_linear(getattr(self, name)))
        for name in ("out_proj", "fc2"):
            setattr(self, name, RowParallelLinear.from_linear(getattr(self, name)))


class Reader(nn.Module):
    """Reads a digit row by row."""

    def __init__(self, block, d_model=32, nhead=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Linear(8, d_model), block(d_model, nhead)
        self.head = nn.Linear(d_model, 10)

    def forward(self, x):
        return self.head(self.block(self.embed(x.unflatten(-1, (8, 8)))).mean(-2))


def train_reader(block):
    model = Reader(block).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for data, target in zip(pixels[:1024].split(128), labels[:1024].split(128), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(f"{loss.item():.4f}")
    return losses


alone, together = train_reader(Transformer), train_reader(TensorParallelTransformer)
if rank == 0:
    print("loss in one piece:  ", *alone)
    print("loss on four ranks: ", *together)

# %% [markdown]
# `axon_nb.parallel.TensorParallelBlock` is such a block, ready to use, and `parallelize(model, plan)` shards an
# ordinary model: see `05_tensor_parallel`.
#
# ## Pipeline parallelism
#
# The model's layers are distributed over ranks, and activations travel from one rank to the next.
#
# - Corrected: `self.partitions` was a plain list, so `parameters()` was empty and the optimizer had nothing to train.
# - Corrected: one process drove all devices, one after the other, with a blocking copy between them; here each rank
#   holds one stage.
# - Completed: the backward pass. `Pipeline` sends gradients back along the path of the activations.


# %%
# %%distributed
from axon_nb.parallel import Pipeline, bubble_fraction, ideal_timeline


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(device)


pipe = Pipeline.split(layers(), at=["2", "4", "6"], num_microbatches=4, schedule="GPipe", loss=F.cross_entropy)
print(f"stage {pipe.stage_indices[0]} has", ", ".join(name for name, _ in pipe.named_parameters()))

output = pipe(pixels[:32] if pipe.is_first else None)  # comes out on the last rank
if pipe.is_last:
    print("the output of one process:", torch.allclose(output, layers()(pixels[:32]), atol=1e-6))

# %% [markdown]
# ### GPipe (micro-batching for pipeline)
#
# While rank 1 works on the first microbatch, rank 0 begins the second.
#
# - Corrected: the guide's `GPipe` ran the microbatches through the full model one after the other, without any
#   pipelining; here all ranks compute at the same time, except for the *bubble* at both ends.


# %%
# %%distributed
def train_gpipe(pipe, batches, optimizer):
    for data, target in batches:
        optimizer.zero_grad()
        losses = pipe.step(data if pipe.is_first else None, target if pipe.is_last else None)
        optimizer.step()
    return pipe.mean_loss(losses)


batches = list(zip(pixels[:1440].split(96), labels[:1440].split(96), strict=True))
optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
loss = train_gpipe(pipe, batches * 2, optimizer)

reference = layers()
reference_optimizer = torch.optim.Adam(reference.parameters(), lr=3e-3)
for data, target in batches * 2:
    reference_optimizer.zero_grad()
    reference_loss = F.cross_entropy(reference(data), target)
    reference_loss.backward()
    reference_optimizer.step()

if rank == 0:
    print(f"loss {loss:.4f} in the pipeline, {reference_loss.item():.4f} in one process")
    for microbatches in (4, 16):
        idle = bubble_fraction(ideal_timeline("GPipe", num_ranks=4, num_microbatches=microbatches))
        print(f"{microbatches} microbatches: ranks are idle {idle:.0%} of the time at best")

# %% [markdown]
# `1F1B` is as fast and keeps fewer activations, and five other schedules have smaller bubbles; `06_pipeline` draws
# them.
#
# # Advanced techniques
#
# ## ZeRO (Zero Redundancy Optimizer)
#
# Parameters, gradients and optimizer states are sharded over ranks instead of held by all. First, what it saves:
#
# - Corrected: "4x" and "8x" are the limits of stages 1 and 2 with Adam, half-precision parameters and very many ranks.
#   Below are the bytes for this optimizer, this dtype and four ranks. (Torch's stages 2 and 3 hold the same between
#   steps; from forward to backward, stage 2 keeps parameters gathered. The ZeRO paper's stage 2 never shards them.)

# %%
# %%distributed
from axon_nb.parallel import FSDP, ShardingStrategy

stages = {
    "DDP": ShardingStrategy.NO_SHARD,
    "ZeRO-1": ShardingStrategy.OPTIMIZER_STATE,
    "ZeRO-2": ShardingStrategy.SHARD_GRAD_OP,
    "ZeRO-3": ShardingStrategy.FULL_SHARD,
}
for name, strategy in stages.items():
    wide = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(device)
    sharded = FSDP(wide, strategy=strategy)
    stats = sharded.memory_estimate(optimizer=torch.optim.AdamW)
    if rank == 0:
        print(f"{name}: {stats.total_memory_mb():.2f} MiB on this rank, {stats.memory_savings():.0%} saved")

# %% [markdown]
# ### DeepSpeed
#
# DeepSpeed is where ZeRO comes from. It is optional (`%pip install deepspeed`); if it is missing, the cell says so.
#
# - Corrected: an engine returns what the model returns, so the guide's model would have to return a loss.
# - Corrected: `args=args` is the command line of DeepSpeed's own launcher; in a cell, as under torchrun, the
#   configuration is all it needs.
# - Corrected: `train_batch_size` counts all ranks and all accumulated pieces: 64 here are 16 on each of four ranks.
# - Completed: bfloat16, which needs no GPU and no scaling, and one of torch's optimizers: DeepSpeed's own for
#   offloading is compiled at its first use, which needs a compiler and takes a minute.


# %%
# %%distributed
import warnings


def train_with_deepspeed(stage, epochs=2):
    import deepspeed

    ds_config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    model = your_model()
    model_engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config=ds_config,
    )
    train_loader = DataLoader(train_dataset, batch_size=16, sampler=DistributedSampler(train_dataset))
    for epoch in range(epochs):
        train_loader.sampler.set_epoch(epoch)
        for data, target in train_loader:
            loss = F.cross_entropy(model_engine(data.to(model_engine.device).bfloat16()).float(), target)
            model_engine.backward(loss)
            model_engine.step()
    return reduce_metrics({"loss": loss.item()}, weight=len(data))["loss"]


if find_spec("deepspeed") is None:
    if rank == 0:
        print("DeepSpeed is not installed, so this section is left out: %pip install deepspeed")
else:
    for stage in (2, 3):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's, about its own names
            loss = train_with_deepspeed(stage)
        if rank == 0:
            print(f"DeepSpeed, ZeRO-{stage}: loss {loss:.3f}")

# %% [markdown]
# ## Fully Sharded Data Parallel (FSDP)
#
# ZeRO-3, built into PyTorch. `FSDP` here is torch's `fully_shard`.
#
# - Corrected: `mixed_precision=True` is not a policy; here it is a dtype, with gradients reduced in float32.
# - Corrected: `if rank == 0: torch.save(model.state_dict())` hangs, because gathering a sharded state needs all ranks;
#   every rank calls `full_state_dict`, and one writes.
# - Completed: a model with 26 thousand parameters; units have at least 5 thousand instead of 100 million.


# %%
# %%distributed
def train_fsdp(epochs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = FSDP(model.to(device), wrap=5_000, mixed_precision=torch.bfloat16)
    optimizer = model.optimizer(torch.optim.Adam, lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = F.cross_entropy(output.float(), target)
            loss.backward()
            model.clip_grad_norm(1.0)  # by the norm over all shards
            optimizer.step()
    save_on_main(model.full_state_dict(), folder / "fsdp_checkpoint.pt")
    return model


fsdp_model = train_fsdp()
weight = fsdp_model.module[2].weight
right = accuracy(fsdp_model)
print(f"holds {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")
if rank == 0:
    print(f"{right:.1%} right; the file is {(folder / 'fsdp_checkpoint.pt').stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## 3D parallelism (data + tensor + pipeline)
#
# The model is split in all three ways at once: stages over one axis of a mesh, matrices over another, samples over the
# third.
#
# - Completed: everything; the guide's three groups were a `pass` each. Every rank has its own group along each axis.
# - Corrected: DDP wrapped the pipeline, whose backward DDP cannot see; instead, the rank's part of a stage is sharded
#   over `dp`, and its gradients are averaged once per step.
#
# Two times two times two is eight ranks, as in `07_three_d`; with four, one of the axes has length 1. Either way the
# losses equal those of one process.

# %%
# %%distributed
from collections import OrderedDict

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from axon_nb.parallel import Parallel3D, axis_group, make_mesh


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def deep_model():
    torch.manual_seed(0)
    blocks = [(f"block{number}", Block(64)) for number in range(4)]
    return nn.Sequential(OrderedDict([*blocks, ("head", nn.Linear(64, 10))])).to(device)


def train_3d(mesh, steps=5):
    model = Parallel3D(
        deep_model(),
        mesh,
        tp_plan={"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()},
        num_microbatches=4,
        loss=F.cross_entropy,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for data, target in batches[:steps]:
        optimizer.zero_grad()
        losses = model.step(model.local_batch(data), model.local_batch(target))
        optimizer.step()
    return model.mean_loss(losses)


model = deep_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for data, target in batches[:5]:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()

for axes in ({"pp": 2, "dp": 1, "tp": 2}, {"pp": 2, "dp": 2, "tp": 1}, {"pp": 1, "dp": 2, "tp": 2}):
    mesh = make_mesh(**axes)
    groups = ", ".join(f"{axis} {list(axis_group(mesh, axis).ranks)}" for axis in axes)
    result = train_3d(mesh)
    if rank == 0:
        print(f"{axes}: loss {result:.5f}, in one process {loss.item():.5f}; groups of rank 0: {groups}")

# %% [markdown]
# # Frameworks and tools
#
# ## Accelerate (Hugging Face)
#
# Accelerate needs few changes to a single-process loop. It is optional, too; the cell has already done what
# `accelerate launch` would do.
#
# - Corrected: `wait_for_everyone` came before the file was written, and nothing came after; now the others wait for the
#   file.
# - Corrected: on CPUs Accelerate treats ranks as independent unless CPU use is forced; our ranks set the switch.
# - Completed: bfloat16, because float16 needs a GPU, and a batch of two tensors instead of a tokenizer's.


# %%
# %%distributed
def train_with_accelerate(epochs=3):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model = your_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    train_loader = DataLoader(train_dataset, batch_size=8, shuffle=True, generator=generator)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for _ in range(epochs):
        for data, target in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(data), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    unwrapped_model = accelerator.unwrap_model(model)
    accelerator.save(unwrapped_model.state_dict(), folder / "model.pt")
    accelerator.wait_for_everyone()
    return accelerator, unwrapped_model


if find_spec("accelerate") is None:
    if rank == 0:
        print("Accelerate is not installed, so this section is left out: %pip install accelerate")
else:
    accelerator, model = train_with_accelerate()
    saved = your_model()
    saved.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    right, together = accuracy(saved), in_step(model)
    print(f"process {accelerator.process_index} of {accelerator.num_processes}; {right:.1%} right, in step: {together}")

# %% [markdown]
# ### transformers' Trainer
#
# The guide stops at Accelerate; most people use it through `Trainer`, which runs unmodified as well. Any module works
# that takes its inputs by name and returns the loss.


# %%
# %%distributed
class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = your_model()

    def forward(self, pixels, labels):
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def train_with_trainer(epochs=5):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,  # all are used in every step
        disable_tqdm=rank > 0,  # all ranks would draw the same table
    )
    model, examples = Digits().to(device), [{"pixels": data, "labels": target} for data, target in train_dataset]
    Trainer(model=model, args=arguments, train_dataset=examples).train()
    return model.layers


if find_spec("transformers") is None:
    if rank == 0:
        print("transformers is not installed, so this section is left out: %pip install transformers")
else:
    model = train_with_trainer()
    right, together = accuracy(model), in_step(model)
    print(f"Trainer: {right:.1%} right, in step: {together}")

# %% [markdown]
# ## Horovod
#
# Horovod itself does not build on current PyTorch. `axon_nb.compat.horovod` provides its functions on axon_nb's groups,
# so its scripts run with one changed line.
#
# - Corrected: nothing distributed the samples, so all ranks computed the same gradients, and four ranks did the work of
#   one; a sampler distributes them.
# - Completed: `set_epoch`; without it every epoch has the same order. `horovodrun` is not needed here.


# %%
# %%distributed
import axon_nb.compat.horovod as hvd  # instead of: import horovod.torch as hvd


def train_with_horovod(epochs=5):
    hvd.init()
    model = your_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
    return model, hvd.allreduce(loss.detach(), name="loss").item()


model, loss = train_with_horovod()
right, together = accuracy(model), in_step(model)
print(f"loss {loss:.3f}, {right:.1%} right, in step: {together}")

# %% [markdown]
# ## torch.compile
#
# We compile the wrapped model, so that gradients are still reduced while backward runs. Inductor, the default,
# generates C++ if there is no GPU; without a compiler, use another backend. (Dynamo's warnings are off: every rank
# would warn that DDP's profiler marker is skipped.)

# %%
# %%distributed
import logging
import shutil

from torch.nn.parallel import DistributedDataParallel

logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
backend = "inductor" if shutil.which("g++") else "eager"
compiled = torch.compile(DistributedDataParallel(your_model()), backend=backend)
optimizer = torch.optim.Adam(compiled.parameters(), lr=3e-3)
for _ in range(20):
    optimizer.zero_grad()
    loss = F.cross_entropy(compiled(pixels[rank:1440:4]), labels[rank:1440:4])
    loss.backward()
    optimizer.step()
together = in_step(compiled)
print(f"compiled: in step: {together}")

# %% [markdown]
# ## torch.distributed.checkpoint
#
# Each rank writes its shards; any number of ranks, or a single process, reads them. `Checkpoints` of `axon_nb.parallel`
# is built on it and adds what a run needs: finding the newest good checkpoint after a kill, and saving in the
# background.

# %%
# %%distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

sharded = fully_shard(your_model())
dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=folder / "sharded")
whole = {"model": {name: torch.zeros_like(value) for name, value in your_model().state_dict().items()}}
if rank == 0:  # alone, as a script without ranks would; torch warns about that
    with warnings.catch_warnings(action="ignore"):
        dcp.load(whole, checkpoint_id=folder / "sharded", no_dist=True)
    same = all(torch.equal(value, whole["model"][name]) for name, value in your_model().state_dict().items())
    print(f"four ranks' shards, read by one process: equal: {same}")

# %% [markdown]
# # Best practices
#
# ## Profiling and bottleneck analysis
#
# - Completed: `criterion`, and what to do with the result; the file opens in TensorBoard and in Perfetto.
# - Corrected: traces were named after process ids; named after ranks, you know which is which.
# - Corrected: `ProfilerActivity.CUDA` is requested only if there is a GPU.
#
# Without any of this code, `%%distributed --profile` profiles a cell, and `%timeline` shows live what ranks do. (Lines
# with `USDT` are the profiler's own.)

# %%
# %%distributed
from torch import profiler


def profile_training(model, optimizer, train_loader):
    gpu = [profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, *gpu],
        schedule=profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder / "log"), worker_name=f"rank{rank}"),
        with_stack=True,
    ) as prof:
        for step, (data, target) in enumerate(train_loader):
            if step >= 1 + 1 + 3:
                break
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return prof


model = DDP(your_model())
prof = profile_training(model, torch.optim.Adam(model.parameters(), lr=1e-3), train_loader)
operators = [event for event in prof.key_averages() if "::" in event.key]  # and not Python's functions
dearest = sorted(operators, key=lambda event: event.self_cpu_time_total, reverse=True)[:4]
dist.barrier()
if rank == 0:
    print("dearest:", ", ".join(event.key for event in dearest))
    print("traces:", *sorted(path.name.partition(".")[0] for path in (folder / "log").iterdir()))

# %% [markdown]
# ## Gradient checkpointing
#
# What a layer computes in forward is not kept but recomputed in backward.
#
# - Corrected: without `use_reentrant=False` a layer whose input needs no gradient gets none itself, and so does the
#   next one; the guide's model trained only its last layer.
# - Corrected: a single linear layer keeps only its input, so nothing was saved; checkpoint whole blocks instead.
# - Corrected: "50 % less memory, 20 % more time" is not a constant; below is what autograd keeps for this model, apart
#   from the inputs of the two blocks.

# %%
# %%distributed
from torch.utils.checkpoint import checkpoint


class CheckpointedModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.layer2 = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.layer3 = nn.Linear(256, 10)
        self.options = options

    def forward(self, x):
        for layer in (self.layer1, self.layer2):
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return self.layer3(x)


def step(model):
    """Bytes that autograd keeps from forward to backward, and the gradients."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(pixels[:256]), labels[:256])
    loss.backward()
    return sum(kept.values()), [parameter.grad for parameter in model.parameters()]


plain, gradients = step(CheckpointedModel().to(device))
thrifty, same = step(CheckpointedModel(use_reentrant=False).to(device))
with warnings.catch_warnings(action="ignore"):
    _, lost = step(CheckpointedModel(use_reentrant=True).to(device))
if rank == 0:
    print(f"keeps {thrifty / 1024:.0f} instead of {plain / 1024:.0f} KiB")
    print("the same gradients:", all(map(torch.equal, gradients, same)))
    print("as in the guide, parameters without a gradient:", sum(gradient is None for gradient in lost))

# %% [markdown]
# `axon_nb.parallel.checkpoint_blocks(model, Block)` does this for a model without such code.
#
# ## Communication optimization
#
# ### Overlap communication and computation
#
# - Corrected: nothing waited for the reductions, so the optimizer stepped while they ran.
# - Corrected: they summed instead of averaging.
# - Corrected: a hook on a gradient sees it before it is added to `.grad`; the post-accumulate hook is the right one.
#
# DDP does all of this, in buckets; `axon_nb.comm.GradientSynchronizer` does it for loops without DDP.

# %%
# %%distributed
from axon_nb.comm import GradientSynchronizer, all_gather, all_reduce_sum, reduce_scatter_sum
from axon_nb.parallel import Hierarchical, TopK


def overlap_communication_computation(model):
    """Average each gradient as soon as it exists; returns what to call before the optimizer's step."""
    under_way = []

    def begin(parameter):
        parameter.grad.div_(world_size)
        under_way.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin)

    def wait():
        while under_way:
            under_way.pop(0).wait()

    return wait


x, y = pixels[rank:256:world_size], labels[rank:256:world_size]
by_hand, in_buckets, by_ddp = your_model(), your_model(), DDP(your_model())
wait = overlap_communication_computation(by_hand)
F.cross_entropy(by_hand(x), y).backward()
wait()
with GradientSynchronizer(bucket_size=4096).attach(in_buckets) as synchronizer:
    F.cross_entropy(in_buckets(x), y).backward()
    synchronizer.sync_all()
F.cross_entropy(by_ddp(x), y).backward()
for name, model in {"by hand": by_hand, "in buckets": in_buckets}.items():
    pairs = zip(model.parameters(), by_ddp.parameters(), strict=True)
    print(f"{name}, as DDP:", all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in pairs))

# %% [markdown]
# ### Gradient compression
#
# - Corrected: the result was as long as the gradient, padded with zeros, and so was the message; now only values and
#   their indices are sent.
# - Corrected: what was not sent was lost; now it is kept and added to the next gradient (*error feedback*).
# - Corrected: one percent of fewer than 100 elements is zero elements.
#
# `TopK` does this as a DDP hook; `FP16`, `BF16` and `PowerSGD` are others (`03_data_parallel`).


# %%
# %%distributed
def gradient_compression(gradient, left_over, compression_ratio=0.01):
    """Indices and values of the largest elements; the others stay in `left_over` for the next time."""
    left_over += gradient.flatten()
    k = max(1, int(compression_ratio * left_over.numel()))
    indices = left_over.abs().topk(k).indices
    values = left_over[indices]
    left_over[indices] = 0
    return indices, values


gradient = by_ddp.module[0].weight.grad
left_over = torch.zeros(gradient.numel(), device=gradient.device)
indices, values = gradient_compression(gradient, left_over)
restored = left_over.index_add(0, indices, values).view_as(gradient)
if rank == 0:
    print(f"{len(values)} of {gradient.numel()} values travel; nothing is lost: {restored.equal(gradient)}")


def train_with(hook, epochs=8):
    model = DDP(your_model())
    if hook is not None:
        model.register_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
    return accuracy(model)


hook = TopK(0.05)
compressed, plain = train_with(hook), train_with(None)
if rank == 0:
    print(f"{compressed:.1%} right with {hook.stats.ratio:.0%} of the bytes, {plain:.1%} with all of them")

# %% [markdown]
# ### Hierarchical all-reduce
#
# Links are fast within a node and slow between nodes. If each node reduces first, only a share of the bytes has to
# travel between nodes. Here two ranks count as a node.
#
# - Completed: both levels; the guide only had a comment for each.
# - Corrected: eight GPUs per node were hard-coded; a mesh says which ranks belong together.


# %%
# %%distributed
def hierarchical_all_reduce(tensor, mesh):
    node, local = axis_group(mesh, "node"), axis_group(mesh, "local")
    part = reduce_scatter_sum(tensor, group=local)  # within the node: each rank has a part of its sum
    all_reduce_sum(part, group=node)  # between nodes: a part only
    return all_gather(part, group=local)  # within the node again


mesh = make_mesh(node=2, local=2)
tensor = torch.arange(8.0, device=device) * (rank + 1)
print("as one all_reduce:", hierarchical_all_reduce(tensor, mesh).equal(all_reduce_sum(tensor.clone())))

hook = Hierarchical(mesh)
right = train_with(hook, epochs=3)
if rank == 0:
    share = hook.bytes_across_nodes / hook.stats.bytes_uncompressed
    print(f"{right:.1%} right, and {share:.0%} of the bytes went between nodes")

# %% [markdown]
# # Common issues
#
# "Hanging: ensure all processes reach collective operations", says the guide. Here one does not. Elsewhere that means
# half an hour of silence. A `%%distributed` cell ends, reports which rank waits for which, and leaves everything from
# before intact.

# %% tags=["raises-exception"]
# %%distributed
if rank != 2:
    dist.all_reduce(torch.ones(1, device=device))

# %%
# %%distributed
right = accuracy(ddp_model)
print(f"the first model is still there, {right:.1%} right")

# %% [markdown]
# # Summary
#
# | strategy | memory | speed | complexity | when | more |
# |---|---|---|---|---|---|
# | DDP | everything on every rank | fastest | low | the model fits | `03_data_parallel` |
# | FSDP, ZeRO-3 | a shard of the states | gathers for every unit | low | the states do not fit | `04_fsdp_zero` |
# | tensor parallel | a shard of each matrix | two reductions per block | medium | huge layers | `05_tensor_parallel` |
# | pipeline | some of the layers | a bubble | medium | very many layers | `06_pipeline` |
# | 3-D | all three | all three | high | nothing else is enough | `07_three_d` |
#
# Start with DDP, and change when memory runs out. Mixed precision and accumulation work with all of them. Profile
# before you optimise, and compare with one process before you trust a loss.

# %%
# %%distributed
dist.barrier()  # all are done with the files
if rank == 0:
    shutil.rmtree(folder)

# %%
# %distributed stop
