# In the shape of pytorch/examples, distributed/minGPT-ddp: configurations as dataclasses, a split by random_split, a
# Trainer with epochs of training and testing, and torchrun's @record.
import os
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog; " * 6


@dataclass
class GPTConfig:
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 16
    vocab_size: int = 0
    block_size: int = 0


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 16
    grad_norm_clip: float = 1.0


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        chars = sorted(set(text))
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.vocab_size, self.block_size, self.data = len(chars), block_size, text

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        chunk = [self.stoi[s] for s in self.data[idx : idx + self.block_size + 1]]
        return torch.tensor(chunk[:-1]), torch.tensor(chunk[1:])


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        layer = nn.TransformerEncoderLayer(
            config.n_embd, config.n_head, 2 * config.n_embd, dropout=0.1, batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, config.n_layer)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.head(self.blocks(self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]], mask=mask))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Trainer:
    def __init__(self, config, model, optimizer, train_set, test_set):
        self.config, self.optimizer = config, optimizer
        self.rank = int(os.environ["RANK"])
        self.loaders = {True: self._loader(train_set), False: self._loader(test_set)}
        self.model = DDP(model)

    def _loader(self, dataset):
        sampler = DistributedSampler(dataset, shuffle=True)
        return DataLoader(dataset, batch_size=self.config.batch_size, shuffle=False, sampler=sampler)

    def _run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def train(self):
        for epoch in range(self.config.max_epochs):
            for train in (True, False):
                self.model.train(train)
                losses = [self._run_batch(*batch, train) for batch in self.loaders[train]]
                print(f"rank {self.rank} epoch {epoch} train {train} loss {sum(losses)!r}")


def get_train_objs(gpt_cfg):
    dataset = CharDataset(TEXT, block_size=8)
    train_len = int(len(dataset) * 0.9)
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len])
    gpt_cfg.vocab_size, gpt_cfg.block_size = dataset.vocab_size, dataset.block_size
    model = GPT(gpt_cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, train_set, test_set


@record
def main():
    init_process_group(backend="gloo")
    gpt_cfg, trainer_cfg = GPTConfig(), TrainerConfig(batch_size=32)
    torch.manual_seed(42)
    model, optimizer, train_data, test_data = get_train_objs(gpt_cfg)
    if int(os.environ["RANK"]) == 0:
        print(asdict(gpt_cfg))
    trainer = Trainer(trainer_cfg, model, optimizer, train_data, test_data)
    trainer.train()


if __name__ == "__main__":
    try:
        main()
    finally:
        destroy_process_group()
