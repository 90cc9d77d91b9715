"""`%%distributed --compare`: a cell on all ranks beside the same cell on one, the first difference, and its cause."""
