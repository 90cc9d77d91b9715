# refused: eight times as long
long_documents = {
    "dp": 32, "tp": 2, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": False,
}  # fmt: skip
