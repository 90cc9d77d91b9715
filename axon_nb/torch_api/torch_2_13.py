"""torch 2.13: differences from 2.14."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from axon_nb.torch_api.torch_2_14 import Torch214


class Torch213(Torch214):
    """The adapter for torch 2.13."""

    last = (2, 13)

    def begin_sequence(self, backend: Any) -> None:
        """Agree with the peers on the first sequence number."""
        backend._set_sequence_number_for_group()

    @contextlib.contextmanager
    def static_stages(self) -> Iterator[None]:
        """Skip the stages' vote on whether all know their shapes, which a fake world cannot answer."""
        from torch.distributed.pipelining import schedules

        base: Any = schedules._PipelineSchedule
        vote = base._warmup_p2p

        def decide(_: Any, stages: list[Any], *__: Any) -> None:
            for stage in stages:
                stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

        base._warmup_p2p = decide
        try:
            yield
        finally:
            base._warmup_p2p = vote
