"""Training steps of one rank on a card, and what CUDA's allocator counts at their highest moment.

A process of its own, so that nothing of the tests lies in the card's memory; it needs nothing of Jupyter's.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from axon_nb.parallel import DDP, FSDP, ShardingStrategy, checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss

CONFIG = GPTConfig(vocab=8192, context=512, hidden=1024, heads=16, blocks=8)
BATCH = 4
_STEPS = 4
"""After the first one the optimizer's states are there, after the second one DDP's buckets."""


@dataclass(frozen=True)
class Case:
    """One way to train the model on one rank."""

    strategy: str
    mixed: bool
    again: bool

    @property
    def name(self) -> str:
        """In words."""
        return "-".join([self.strategy, "mixed" if self.mixed else "float32", *(["again"] if self.again else [])])


def main(store: str, cases: str) -> None:
    """Print the peak of each case in bytes, as JSON.

    Args:
        store: A file that is not there yet: through it the one rank forms its group.
        cases: Fields of each `Case`, as JSON.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=FileStore(store, 1), rank=0, world_size=1, device_id=device)
    asked = [Case(**fields) for fields in json.loads(cases)]
    peak(asked[0], device)  # libraries take memory of their own in the first step, and keep it
    found = {case.name: peak(case, device) for case in asked}
    dist.destroy_process_group()
    print(json.dumps(found))


def peak(case: Case, device: torch.device) -> int:
    """Bytes that a step takes at its highest moment, beyond what was taken before the model was made."""
    before = _settled()
    model, optimizer = _made(case, device)
    tokens = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.context), device=device)
    for _ in range(_STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        next_byte_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    del model, optimizer, tokens
    _settled()
    return found


def _made(case: Case, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    if case.again:
        checkpoint_blocks(model, Block)
    if case.strategy == "ddp":
        return DDP(model), torch.optim.AdamW(model.parameters())
    dtype = torch.bfloat16 if case.mixed else None
    wrapped = FSDP(model, strategy=ShardingStrategy(case.strategy), mixed_precision=dtype)
    return wrapped, wrapped.optimizer(torch.optim.AdamW)


def _settled() -> int:
    """Bytes that are given out once nothing is left of what was let go of."""
    gc.collect()
    # Until the next backward, autograd's thread keeps the last DDP reducer and its buckets (torch 2.11).
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def reported(cases: list[Case]) -> str:
    """The cases as `main` takes them."""
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    main(*sys.argv[1:3])
