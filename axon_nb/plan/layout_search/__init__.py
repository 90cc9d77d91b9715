"""Which layout fits and is fastest: `plan.search`."""
