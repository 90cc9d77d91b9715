# refused: without recomputing, just so
long_documents = {
    "dp": 64, "tp": 1, "pp": 1, "strategy": "full_shard", "num_microbatches": 1, "activation_checkpointing": True,
}  # fmt: skip
