# refused: over PCIe
small_cards = {
    "dp": 1, "tp": 2, "pp": 4, "strategy": "shard_grad_op", "num_microbatches": 32, "activation_checkpointing": True,
}  # fmt: skip
