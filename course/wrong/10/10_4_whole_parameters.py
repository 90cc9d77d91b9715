# refused: left for whole parameters
long_documents = {
    "dp": 64, "tp": 1, "pp": 1, "strategy": "shard_grad_op", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
