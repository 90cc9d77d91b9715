# refused: memory to spare
slow_wires = {
    "dp": 4, "tp": 8, "pp": 2, "strategy": "shard_grad_op", "num_microbatches": 16, "activation_checkpointing": True,
}  # fmt: skip
