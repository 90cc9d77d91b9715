"""Programs outside the notebook: `axon-nb status`, `run` and so on, on a cluster that a notebook uses."""
