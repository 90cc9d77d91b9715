"""Every message between a notebook, its ranks and the host agent: typed, checked on both sides, versioned."""
