"""The names that a training script usually needs: ``from axon_nb.prelude import *``."""

from __future__ import annotations

from axon_nb import comm, parallel
from axon_nb.comm import *  # noqa: F403 - that is what a prelude is
from axon_nb.parallel import *  # noqa: F403

__all__ = comm.__all__ + parallel.__all__
