"""Plans for programs: which layout of a model fits on some GPUs and is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_nb.errors import UsageError

SIZES: Mapping[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "1.3b": (2048, 32, 24),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "66b": (9216, 72, 64),
    "175b": (12288, 96, 96),
}
"""Hidden size, heads and blocks of GPTs by number of parameters: table 1 of the OPT paper, arXiv:2205.01068."""
_VOCAB = 50304


def plan_layouts(
    model: str,
    ranks: int,
    *,
    card: str = "h100",
    memory_gib: float | None = None,
    context: int = 2048,
    global_batch: int | None = None,
    top: int = 5,
) -> dict[str, Any]:
    """Rank the layouts of a model's training step in bfloat16 with AdamW.

    Args:
        model: The size of a GPT such as ``7B``, or a causal language model of Hugging Face: its name or folder.
        ranks: Number of GPUs.
        card: The GPU's name, such as ``h100``.
        memory_gib: GiB per GPU; None: the card's.
        context: Tokens in a sample.
        global_batch: Samples per step over all GPUs; None: two per GPU.
        top: How many layouts to return.

    Raises:
        UsageError: the card or a number is invalid, or the model cannot be planned.
    """
    from axon_nb import plan
    from axon_nb.plan.hardware.cards import CARDS

    if card not in CARDS:
        raise UsageError(f"--card {card}: must be one of {', '.join(CARDS)}.")
    size = SIZES.get(model.lower())
    source: Any = model
    options: dict[str, Any] = {"seq": context}
    if size is not None:
        from axon_nb.parallel.models import GPTConfig

        hidden, heads, blocks = size
        source = GPTConfig(vocab=_VOCAB, context=context, hidden=hidden, heads=heads, blocks=blocks)
    elif "/" not in model:
        raise UsageError(f"{model!r} must be one of {', '.join(SIZES)}, or a model of Hugging Face such as org/name.")
    limit = CARDS[card].gib if memory_gib is None else memory_gib
    table = plan.search(
        source,
        ranks,
        limit,
        rates=card,
        links=card,
        global_batch=global_batch,
        mixed_precision="bfloat16",
        **options,
    )
    layouts = [
        {
            "dp": one.dp,
            "tp": one.tp,
            "pp": one.pp,
            "strategy": one.strategy,
            "microbatches": one.num_microbatches,
            "activation_checkpointing": one.activation_checkpointing,
            "step_ms": round(one.step_s * 1e3, 3) if one.memory else None,
            "memory_gib": round(one.memory_bytes / 1024**3, 3) if one.memory else None,
            "fits": one.fits,
            "reason": one.reason,
        }
        for one in table.candidates[: max(1, top)]
    ]
    return {
        "title": table.title,
        "fits": table.best is not None,
        "global_batch": table.global_batch,
        "layouts": layouts,
        "notes": list(table.notes),
        "text": str(table),
    }
