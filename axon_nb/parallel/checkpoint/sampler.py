"""A DistributedSampler that knows where it is in an epoch, and goes on from there on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from axon_nb.parallel.checkpoint.errors import CheckpointError

__all__ = ["ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """Deals a dataset out to ranks, and can stop and go on within an epoch.

    Give it to `Checkpoints` as ``sampler=``. It counts what it has given out; a DataLoader with workers fetches ahead
    of training, so tell it with `set_position` before saving how many samples the ranks have trained on together.
    Every iteration over a DataLoader draws a seed from torch's random numbers: with a generator of its own
    (``generator=torch.Generator()``) a run that is resumed within an epoch draws the same numbers as one that was not.

    Args:
        dataset: What has samples.
        **options: Those of `DistributedSampler`.
    """

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        super().__init__(dataset, **options)
        self._position, self._over = 0, False

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have been given."""
        return self._position

    def set_position(self, samples: int) -> None:
        """Go on after so many samples of the epoch, all ranks together.

        Raises:
            CheckpointError: the epoch has not so many.
        """
        if not 0 <= samples <= self.total_size:
            raise CheckpointError(f"position {samples}: the epoch has {self.total_size} samples.")
        self._position, self._over = samples, False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that it is in goes on."""
        if epoch != self.epoch:
            self._position, self._over = 0, False
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """This rank's samples that are left; one after the other, as the ranks take turns."""
        if self._over:
            self._position, self._over = 0, False
        for index in islice(super().__iter__(), self._done(), None):
            self._position += self.num_replicas
            yield index
        self._over = True

    def __len__(self) -> int:
        """Samples that are left for this rank in the epoch."""
        return self.num_samples - (0 if self._over else self._done())

    def _done(self) -> int:
        return min(self.num_samples, -(-self._position // self.num_replicas))

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the samples of it that all ranks together have been given."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where that was, on as many ranks as there are now."""
        super().set_epoch(state["epoch"])
        self.set_position(min(state["position"], self.total_size))
