# refused: filling and emptying
choice = {"schedule": "1F1B", "num_stages": 4, "num_microbatches": 16}
