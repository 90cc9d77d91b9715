# refused: one data axis
slow_wires = {
    "dp": 64, "tp": 1, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
