# refused: Few microbatches: the stages wait
slow_wires = {
    "dp": 4, "tp": 4, "pp": 4, "strategy": "shard_grad_op", "num_microbatches": 8, "activation_checkpointing": False,
}  # fmt: skip
