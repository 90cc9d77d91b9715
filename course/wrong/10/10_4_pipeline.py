# refused: leaves few
long_documents = {
    "dp": 8, "tp": 2, "pp": 4, "strategy": "shard_grad_op", "num_microbatches": 8, "activation_checkpointing": False,
}  # fmt: skip
