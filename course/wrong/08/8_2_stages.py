# refused: needs one stage per rank
choice = {"schedule": "1F1B", "num_stages": 8, "num_microbatches": 32}
