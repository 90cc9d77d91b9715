"""Plans for a GPU against what CUDA's allocator counts there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb import plan
from axon_nb.parallel.models import Block, GPTConfig
from tests.cluster.script import Script

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(vocab=8192, context=512, hidden=1024, heads=16, blocks=8)
BATCH = 4
SETUP = """
import gc
from axon_nb.parallel import DDP, FSDP, ShardingStrategy, checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss

def peak(config, batch, strategy, mixed, again):
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = GPT(config).to(device)
    if again:
        checkpoint_blocks(model, Block)
    if strategy == "ddp":
        wrapped = DDP(model)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        dtype = torch.bfloat16 if mixed else None
        wrapped = FSDP(model, strategy=ShardingStrategy(strategy), mixed_precision=dtype)
        optimizer = wrapped.optimizer(torch.optim.AdamW)
    x = torch.randint(0, config.vocab, (batch, config.context), device=device)
    for number in range(3):
        if number == 2:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        next_byte_loss(wrapped(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    del model, wrapped, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return found
"""

FIRST = f'peak({CONFIG!r}, {BATCH}, "ddp", False, False)'


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with one rank on NCCL."""
    with Script(tmp_path_factory.mktemp("planned")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(1, backend='nccl')", timeout=120)
        script.ok(f"c.run({SETUP!r})", timeout=120)
        # Libraries take memory of their own in the first step.
        script.ok(f"c.run({FIRST!r})", timeout=120)
        yield script


@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "ddp"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_the_peak_is_that_of_the_card(card: Script, strategy: str, mixed: bool, again: bool) -> None:
    if mixed and strategy == "ddp":
        pytest.skip("autocast has other lists of operations on GPUs than on CPUs")
    call = f"peak({CONFIG!r}, {BATCH}, {strategy!r}, {mixed}, {again})"
    real: Any = card.value(f"c.run({call!r})[0]")
    made = plan.memory(
        CONFIG,
        1,
        strategy=strategy,
        optimizer="AdamW",
        mixed_precision="bfloat16" if mixed else None,
        checkpointing=Block if again else None,
        batch=BATCH,
        fragmentation=0.0,
    )
    assert made.peak_bytes == pytest.approx(real, rel=0.05)
