"""A DistributedSampler that remembers its position in an epoch and resumes there on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from axon_nb.errors import UsageError


class ResumableSampler(DistributedSampler[Any]):
    """Distributes a dataset over ranks and can resume within an epoch.

    Pass it to `Checkpoints` as ``sampler=``. It counts the samples it has yielded. A DataLoader with workers fetches
    ahead of training, so before saving, call `set_position` with the number of samples that all ranks have trained on.
    Each iteration over a DataLoader draws a seed from torch's generator. Give the DataLoader its own generator
    (``generator=torch.Generator()``), so that a resumed run draws the same random numbers as an uninterrupted one.

    Args:
        dataset: The dataset.
        **options: Options of `DistributedSampler`.
    """

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        super().__init__(dataset, **options)
        self._position, self._finished = 0, False

    @property
    def position(self) -> int:
        """Number of samples of this epoch yielded on all ranks together."""
        return self._position

    def set_position(self, samples: int) -> None:
        """Continue after this many samples of the epoch, counted over all ranks.

        Raises:
            UsageError: the epoch has fewer samples.
        """
        if not 0 <= samples <= self.total_size:
            raise UsageError(f"position must be 0 to {self.total_size}, the samples of an epoch; got {samples}.")
        self._position, self._finished = samples, False

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; no effect if it is the current one."""
        if epoch != self.epoch:
            self._position, self._finished = 0, False
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's remaining samples; ranks take turns."""
        if self._finished:
            self._position, self._finished = 0, False
        for index in islice(super().__iter__(), self._num_yielded(), None):
            self._position += self.num_replicas
            yield index
        self._finished = True

    def __len__(self) -> int:
        """Return the number of remaining samples of this rank in the epoch."""
        return self.num_samples - (0 if self._finished else self._num_yielded())

    def _num_yielded(self) -> int:
        return min(self.num_samples, -(-self._position // self.num_replicas))

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its samples yielded on all ranks together."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a saved position, on any number of ranks."""
        super().set_epoch(state["epoch"])
        self.set_position(min(state["position"], self.total_size))
