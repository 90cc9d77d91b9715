"""transformers' Trainer in cells, unmodified, on a tiny model made from a config."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.needs("transformers", "accelerate")


def test_trainer_trains_all_ranks(two: Kernel) -> None:
    reply = two.ok(
        """%%distributed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

def language_model():
    set_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                        attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).double()

tokens = torch.randint(0, 31, (8, 8), generator=torch.Generator().manual_seed(3))
labels = tokens.clone()
labels[:, 0] = -100
examples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]

arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=0.2,
    optim="sgd", lr_scheduler_type="constant", max_grad_norm=1.0, report_to="none", save_strategy="no", logging_steps=1)
model = language_model()
start = flat(model)
trainer = Trainer(model=model, args=arguments, train_dataset=examples)
result = trainer.train()

alone = language_model()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.2)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    logits = alone(input_ids=tokens).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 31), tokens[:, 1:].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())

own, wanted = flat(model), flat(alone)
others = [torch.zeros_like(own) for _ in range(world_size)]
dist.all_gather(others, own)
assert torch.equal(others[0], others[1]), "ranks differ"
assert (own - wanted).abs().max() < 1e-7, (own - wanted).abs().max()
assert (own - start).abs().max() > 1e-3
assert abs(result.training_loss - sum(losses) / 3) < 1e-3, (result.training_loss, losses)
assert (arguments.world_size, arguments.process_index, str(arguments.device)) == (2, rank, "cpu")
assert trainer.is_world_process_zero() == (rank == 0)
""",
    )
    # The notice of a slow rank is a separate display.
    tables = [shown for shown in map(str, reply.displays) if "<progress" in shown]
    table = tables[-1]
    assert "Training Loss" in table, "the Trainer's own table for notebooks, shown as it grows"
