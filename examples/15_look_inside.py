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
# # Look inside a model that is split over ranks
#
# A model that one card cannot hold is split over several, and a hook then sees a part of everything. Here a tiny
# language model that has learned to copy runs on two ranks: generate with it, find the heads that it needs, switch them
# off, and see the text change. Nothing is downloaded: the model is made on the spot. This needs
# `pip install transformers`.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## A model that copies
#
# Its texts are eight random letters and the same eight again, so all after the middle can be known. Rank 0 trains it
# for some seconds and saves it.

# %%
# %%distributed
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

transformers.utils.logging.disable_progress_bar()
letters = "abcdefghijklmnopqrstuvwxyz"


def texts(rows):
    """Return eight random letters twice, in rows of numbers."""
    half = torch.randint(26, (rows, 8), device=device)
    return torch.cat([half, half], 1)


if rank == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    small = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=26, **sizes, **ends)).to(device)
    optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
    for _ in range(250):
        batch = texts(32)
        logits = small(batch).logits[:, 7:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small.save_pretrained("tiny_copier")
    print(f"loss {loss.item():.3f}")
dist.barrier()

# %% [markdown]
# ## Split it
#
# transformers knows how: each rank gets half of the heads, and half of the features of each MLP.

# %%
# %%distributed
split = DistributedConfig(tp_size=world_size, tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained("tiny_copier", distributed_config=split, attn_implementation="eager")
print(model.model.layers[0].self_attn.q_proj.weight.to_local().shape)

# %%
# %shards model

# %% [markdown]
# ## Generate
#
# All ranks call `generate` with the same tokens, and get the same text.

# %%
# %%distributed
prompt = torch.tensor([[letters.index(letter) for letter in "parallelpa"]], device=device)


def continued():
    """Return the text that the model writes."""
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    return "".join(letters[token] for token in tokens[0])


continued()

# %% [markdown]
# ## Which heads look at the letter before?
#
# A model that copies must find the same letter earlier in the text, and then what followed it. So some of its heads
# must look one letter back. `inside.record` keeps the attention maps, and joins the heads of both ranks; `inside.lens`
# reads what each block returns as the model's head would.

# %%
# %%distributed
from axon_nb import inside

torch.manual_seed(1)
with torch.no_grad(), inside.record(model, "layers.*", "layers.*.self_attn:attention") as seen:
    model(texts(64))
read = inside.lens(model, seen, letters.__getitem__)
names = [f"layers.{layer}.self_attn:attention" for layer in range(2)]
maps = torch.stack([seen[name][0].mean(0) for name in names])  # layers, heads, positions, positions
one_back = maps.diagonal(-1, dim1=-2, dim2=-1)[..., 1:].mean(-1)
maps.shape

# %% [markdown]
# `%inside` draws it for the first text: norms, the letters read from each block, and the map of each head, with the
# rank that computed it.

# %%
# %inside seen

# %% [markdown]
# The notebook gets what a head gives to the letter before it as one tensor, a row for each layer.

# %%
# %pull one_back --ranks 0
one_back.round(decimals=2)

# %% [markdown]
# ## Switch them off
#
# `:heads` is what the heads of a layer give to its output projection: (batch, positions, heads, head size). A function
# gets all of it on each rank, though each rank computes two of the four heads, and changes it.


# %%
# %%distributed
def switch_off(value):
    """Switch off the heads of the first layer that look one letter back."""
    value[:, :, one_back[0] > 0.5] = 0


with inside.replace(model, {"layers.0.self_attn:heads": switch_off}):
    changed = continued()
print(f"with    {continued()}\nwithout {changed}")

# %% [markdown]
# ## Ranks must agree
#
# If ranks draw tokens for themselves, each goes on with its part of another text, and nothing fails. So the model
# compares its inputs between the ranks, and says so.

# %%
# %%distributed
torch.manual_seed(rank)
drawn = model.generate(prompt, do_sample=True, temperature=5.0, max_new_tokens=6)

# %% [markdown]
# Seed the ranks alike before you sample.

# %%
# %distributed seed 0

# %%
# %%distributed
drawn = model.generate(prompt, do_sample=True, temperature=5.0, max_new_tokens=6)
"".join(letters[token] for token in drawn[0])

# %%
# %distributed stop
