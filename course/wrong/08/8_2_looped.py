# refused: LoopedBFS sends
choice = {"schedule": "LoopedBFS", "num_stages": 8, "num_microbatches": 12}
