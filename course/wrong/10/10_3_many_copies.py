# refused: with fewer copies
slow_wires = {
    "dp": 16, "tp": 4, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
