# refused: The activations are kept
small_cards = {
    "dp": 8, "tp": 1, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
