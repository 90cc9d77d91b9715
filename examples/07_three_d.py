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
# # Three dimensions: pipeline x sharded data x tensors
#
# The largest models are split in three ways at once. *Pipeline* parallelism distributes the layers. *Tensor*
# parallelism splits each matrix of a layer over ranks that are close to each other. What is left on a rank is *sharded*
# over ranks that see different samples. Eight ranks make a cube of 2 x 2 x 2.

# %%
# %load_ext axon_nb
# %distributed start -n 8

# %% [markdown]
# ## The mesh
#
# Every axis has a name. Ranks that differ in only one coordinate form a group: two that exchange activations, two that
# hold shards of the same parameters, two that hold halves of the same matrices. The last axis varies fastest, so its
# ranks are neighbours.

# %%
# %%distributed
import copy

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from axon_nb.parallel import Parallel3D, axis_group, coordinates, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

torch.set_num_threads(1)
mesh = make_mesh(pp=2, dp=2, tp=2)
place = ", ".join(f"{axis}={index}" for axis, index in coordinates(mesh).items())
groups = ", ".join(f"{axis} {list(axis_group(mesh, axis).ranks)}" for axis in mesh.mesh_dim_names)
print(f"{place}; its groups: {groups}")

# %% [markdown]
# ## The model
#
# The plan lists which layers are split, by name: the projections into attention and the first half of the MLP by
# columns, and those that lead back by rows, so that each pair needs one reduction. The plan does not mention norms and
# embeddings, so they are replicated on both ranks of `tp`. Stages are balanced by parameters, and FSDP2 shards each
# block over `dp`.

# %%
# %%distributed
config = GPTConfig(context=32, hidden=64, heads=4, blocks=6)
plan = {
    "block*.attention.query": ColwiseParallel(),
    "block*.attention.key": ColwiseParallel(),
    "block*.attention.value": ColwiseParallel(),
    "block*.attention.out": RowwiseParallel(),
    "block*.up": ColwiseParallel(),
    "block*.down": RowwiseParallel(),
}
torch.manual_seed(0)
whole = GPT(config).to(device)
reference = copy.deepcopy(whole)  # what one process would train
model = Parallel3D(whole, mesh, tp_plan=plan, num_microbatches=4, loss=next_byte_loss)

weight = next(value for name, value in model.named_parameters() if name.endswith("up.weight"))
held = sum(value.to_local().numel() for value in model.parameters())
print(
    f"holds {held:,} of {sum(p.numel() for p in whole.parameters()):,} parameters; "
    f"of a matrix of {tuple(weight.shape)} it has {tuple(weight.to_local().shape)}"
)

# %% [markdown]
# ## Training
#
# Ranks with the same coordinate on `dp` see the same samples: `local_batch` selects them from a batch that all ranks
# have. For comparison, rank 0 trains the same model alone on the whole batch. The losses are equal up to rounding.

# %%
# %%distributed
text = standard_library(1 << 18)
generator = torch.Generator().manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=2e-3)
first = last = 0.0
for number in range(60):
    x, target = windows(text, batch=32, seq=config.context, generator=generator, device=device)
    optimizer.zero_grad()
    losses = model.step(model.local_batch(x), model.local_batch(target))
    optimizer.step()
    last = model.mean_loss(losses)
    first = first or last
    if rank == 0 and number < 10:
        reference_optimizer.zero_grad()
        loss = next_byte_loss(reference(x), target)
        loss.backward()
        reference_optimizer.step()
        print(f"step {number + 1}: {last:.6f} nats per byte on 8 ranks, {loss.item():.6f} on one")
    elif rank == 0 and number % 10 == 9:
        print(f"step {number + 1}: {last:.3f} nats per byte")
assert last < 0.8 * first

# %%
# %distributed stop
