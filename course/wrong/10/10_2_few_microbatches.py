# refused: Few microbatches
small_cards = {
    "dp": 1, "tp": 1, "pp": 8, "strategy": "shard_grad_op", "num_microbatches": 8, "activation_checkpointing": True,
}  # fmt: skip
