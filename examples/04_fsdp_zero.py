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
# # FSDP and ZeRO: who keeps what
#
# Training holds four numbers per parameter: the value, its gradient and Adam's two moments. With DDP every rank keeps
# all of them. Here each rank keeps only a part: of the optimizer states (ZeRO-1), or of everything (torch's ZeRO-2, and
# ZeRO-3 or FSDP). A small GPT learns to write Python on four ranks.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# ## The model and its text
#
# A byte-level GPT is a plain sequence of blocks. It reads text that comes with every Python: the source of the standard
# library.

# %%
# %%distributed
import time

from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy, checkpoint_blocks, make_mesh, reduce_metrics
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss, standard_library, windows

text = standard_library(1 << 20)
config = GPTConfig(context=64, hidden=64, heads=4, blocks=4)


def batches(steps, batch=8):
    generator = torch.Generator().manual_seed(100 + rank)  # every rank reads other pieces
    for _ in range(steps):
        yield windows(text, batch=batch, seq=config.context, generator=generator, device=device)


gpt = GPT(config).to(device)
names = ", ".join(name for name, _ in gpt.named_children())
print(f"{sum(p.numel() for p in gpt.parameters()):,} parameters in {names}")

# %% [markdown]
# ## The loop
#
# `FSDP(model)` gathers each child of the model just before it computes and shards it again after. The rest of the loop
# is the same as on one process. `model.optimizer(…)` creates an optimizer that matches the strategy, and
# `clip_grad_norm` clips by the norm that one process would compute. Rank 0's initial weights are sent to all.


# %%
# %%distributed
def train(model, optimizer, steps, every=20):
    losses = []
    for step, (inputs, targets) in enumerate(batches(steps)):
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        norm = model.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and every and (step + 1) % every == 0:
            print(f"step {step + 1:3}: loss {sum(losses[-every:]) / every:.2f} nats, norm {norm:.2f}")
    return losses


torch.manual_seed(0)
model = FSDP(GPT(config).to(device))
optimizer = model.optimizer(torch.optim.AdamW, lr=3e-3)
losses = train(model, optimizer, steps=100)
first, last = (reduce_metrics({"loss": sum(part) / 10})["loss"] for part in (losses[:10], losses[-10:]))
if rank == 0:
    print(f"the loss went from {first:.2f} to {last:.2f}")

# %% [markdown]
# ## What it has learned
#
# Between steps each rank has a quarter of each parameter. Within `gathered()` parameters are complete, and can be read
# and changed. All ranks print the same line here, because all have the same weights.

# %%
# %%distributed
weight = model.module.block0.up.weight
print(f"keeps {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")


@torch.no_grad()
def write(prompt, length=80):
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model.module(tokens[:, -config.context :])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


with model.gathered() as whole:
    print("within gathered():", tuple(whole.block0.up.weight.shape))
    print(repr(write("def ")))

# %% [markdown]
# ## Every strategy: bytes and time
#
# The same model with each strategy. *Estimated* is a formula that follows how torch shards and pads; *measured* are the
# bytes of the tensors that rank 0 holds between two steps. They agree to the byte. Neither includes what exists only
# within a step: activations, and the gathered parameters of the current block.

# %%
# %%distributed --quiet --out compared
pairs = make_mesh(copies=2, shards=2)
rows = []
for strategy in (
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.OPTIMIZER_STATE,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_SHARD,
):
    mesh = pairs if strategy is ShardingStrategy.HYBRID_SHARD else None
    model = FSDP(GPT(config).to(device), strategy=strategy, mesh=mesh)
    optimizer = model.optimizer(torch.optim.AdamW, lr=3e-3)
    train(model, optimizer, steps=2, every=0)
    start = time.perf_counter()
    train(model, optimizer, steps=10, every=0)
    seconds = (time.perf_counter() - start) / 10
    inputs, targets = next(batches(1))
    next_byte_loss(model(inputs), targets).backward()  # so that there are gradients to measure
    held, estimate = model.memory_stats(), model.memory_estimate()
    rows.append(
        {
            "strategy": strategy.name,
            "parameters": held.param_memory_bytes,
            "gradients": held.grad_memory_bytes,
            "optimizer": held.optim_memory_bytes,
            "measured": held.total_bytes,
            "estimated": estimate.total_bytes,
            "saved": estimate.memory_savings(),
            "step (ms)": seconds * 1e3,
        }
    )
rows

# %%
import pandas as pd

pd.DataFrame(compared[0]).style.format(
    {
        "parameters": "{:,}",
        "gradients": "{:,}",
        "optimizer": "{:,}",
        "measured": "{:,}",
        "estimated": "{:,}",
        "saved": "{:.1%}",
        "step (ms)": "{:.0f}",
    }
).hide(axis="index")

# %% [markdown]
# - `NO_SHARD` keeps everything everywhere, as DDP does.
# - `OPTIMIZER_STATE` is ZeRO-1: it assigns whole parameters to ranks, so their shares are about equal, but not exactly.
# - `SHARD_GRAD_OP` (torch's ZeRO-2) and `FULL_SHARD` (ZeRO-3) keep the same between steps. The former keeps parameters
#   gathered from forward to backward: more memory then, but one gather less. The paper's ZeRO-2 keeps all parameters
#   on every rank between steps, too; torch has no such strategy.
# - `HYBRID_SHARD` shards within pairs, such as the GPUs of a node; only gradients travel between pairs.
#
# On one computer, with a model this small, sharding only costs time: the ranks share cores and memory anyway.

# %% [markdown]
# ## Accumulation, and less memory
#
# Within `no_sync` backward only accumulates; the last piece of a batch reduces the sum. `checkpoint_blocks` recomputes
# the blocks in backward instead of keeping their activations. `cpu_offload` keeps parameters, optimizer states or both
# in host memory: this frees GPU memory, and on CPUs it makes the same copies. None of this changes the gradients.

# %%
# %%distributed
inputs, targets = next(batches(1, batch=16))


def norm_of(pieces=1, checkpointed=False, **options):
    torch.manual_seed(0)
    gpt = GPT(config).to(device)
    if checkpointed:
        checkpoint_blocks(gpt, Block)
    model = FSDP(gpt, **options)
    *early, last = zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)
    with model.no_sync():
        for x, y in early:
            (next_byte_loss(model(x), y) / pieces).backward()
    (next_byte_loss(model(last[0]), last[1]) / pieces).backward()
    return model.clip_grad_norm(1.0)


norms = {
    "at once": norm_of(),
    "in 4 pieces": norm_of(pieces=4),
    "recomputed": norm_of(checkpointed=True),
    "offloaded": norm_of(cpu_offload=CPUOffload.PARAMS),
    "blocks as units": norm_of(wrap=Block),
    "bfloat16": norm_of(mixed_precision=torch.bfloat16),
}
if rank == 0:
    for name, norm in norms.items():
        print(f"{name:>16}: norm {norm:.6f}")

# %% [markdown]
# Only bfloat16 differs, in the third digit: parameters are rounded for forward and backward, while each rank keeps and
# updates its shard in float32.

# %%
# %distributed stop
