# refused: GPipe keeps every microbatch
choice = {"schedule": "GPipe", "num_stages": 4, "num_microbatches": 24}
