# refused: Something must be shared out
small_cards = {
    "dp": 8, "tp": 1, "pp": 1, "strategy": "ddp", "num_microbatches": 1, "activation_checkpointing": True,
}  # fmt: skip
