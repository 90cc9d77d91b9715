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
# # A long context and many experts
#
# Two ways to split a model that data, tensor and pipeline parallelism leave out. **Context parallelism** splits the
# positions of a sequence: attention still sees all of them, but no rank holds the activations of all. **Expert
# parallelism** replaces the MLP by many small ones, of which each token visits a few. Every rank holds some of them,
# and tokens travel.
#
# Four CPU ranks are enough to see both.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# ## One sequence on four ranks
#
# A position attends to all earlier ones, so the last positions have the most work. The sequence is cut into eight
# chunks, and each rank takes one from the head and one from the tail.

# %%
# %%distributed
from axon_nb.parallel import ContextParallel

context = ContextParallel(512)
print("chunks", context.chunks(), "of 512 positions")

# %% [markdown]
# Keys and values go round in a ring, and each rank merges what its queries find in each part. The result is the
# attention of the whole sequence:

# %%
# %%distributed
from torch.nn import functional

torch.manual_seed(0)  # the same on all ranks: shape (batch, heads, positions, head size)
query, key, value = (torch.randn(1, 4, 512, 16, device=device) for _ in range(3))
whole = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
part = context.attention(*(context.split(x, -2) for x in (query, key, value)))
difference = (part - context.split(whole, -2)).abs().max()
print(f"largest difference {difference.item():.0e}, from {context.size()} of 512 positions")

# %% [markdown]
# With `exchange="all_to_all"` each rank gets all positions of some heads instead: fewer messages, but it needs at least
# as many heads as ranks. `documents=` keeps packed documents apart.
#
# ## A model with experts
#
# In a `with context:` block, torch's `scaled_dot_product_attention` is the one over all ranks: models need no change.
# `Experts` takes the place of a block's MLP: eight experts, two on each rank; each byte goes to the best two.

# %%
# %%distributed
from torch import nn

from axon_nb.parallel import DDP, Experts, Muon, expert_load
from axon_nb.parallel.models import Attention, Embedding, GPTConfig, Head, standard_library, windows

config = GPTConfig(context=512, hidden=64, heads=4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.experts = Experts(config.hidden, 128, 8, top_k=2, balance="loss")

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(config)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = Head(config)

    def forward(self, tokens):
        # Embedded as a whole: positions are numbered in the whole sequence.
        return self.head(self.blocks(context.split(self.embedding(tokens))))


torch.manual_seed(0)
model = Model().to(device)
trained = DDP(model)  # averages the gradients of all but the experts, which no two ranks share

# %%
# %shards model

# %% [markdown]
# ## Train
#
# Matrices are Muon's, everything else is AdamW's. `context.mean` is a loss whose mean over ranks is that of the whole
# sequence, and the balance loss keeps the experts busy.

# %%
# %%distributed
matrices = [p for name, p in model.blocks.named_parameters() if p.ndim >= 2 and "router" not in name]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
text = standard_library(1 << 20)
generator = torch.Generator().manual_seed(1)  # the same text on all ranks: they share each sequence


def step():
    inputs, targets = windows(text, batch=2, seq=512, generator=generator, device=device)
    with context:
        logits = trained(inputs)
        losses = functional.cross_entropy(logits.transpose(1, 2), context.split(targets), reduction="none")
        balance = sum(block.experts.balance_loss for block in model.blocks)
        (context.mean(losses) + 0.01 * balance).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return context.mean(losses.detach())


for number in range(40):
    loss = step()
    dist.all_reduce(loss)
    if rank == 0 and number % 10 == 9:
        print(f"step {number + 1}: loss {loss.item() / world_size:.2f}")

# %% [markdown]
# ## Which experts work?
#
# Each column is an expert, and the darker, the more tokens it got in the last step. `imbalance` is the busiest expert's
# load over the mean; `axon_nb.log(**load.imbalance)` draws it in `%watch`.

# %%
# %%distributed
load = expert_load(model)
print({name: round(ratio, 2) for name, ratio in load.imbalance.items()})
load

# %%
# %distributed stop
