# refused: with the names
choice = {"schedule": "1F1B", "microbatches": 32}
