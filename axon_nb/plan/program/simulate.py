"""Runs a program on the ranks that differ, each in a fork of a process of their own."""

from __future__ import annotations

import gc
import logging
import pickle
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from axon_nb.plan.errors import PlanError
from axon_nb.plan.process.fork_map import fork_map
from axon_nb.plan.process.worker import Report
from axon_nb.plan.program.environment import on_fake_rank
from axon_nb.plan.program.rank import Program, run_rank
from axon_nb.plan.program.record import RankRecord
from axon_nb.plan.program.streams import Recording
from axon_nb.plan.program.uniform import Lane, distinct_ranks, merged
from axon_nb.records.hooks import missing_hooks


def simulate(task: Mapping[str, Any], report: Report) -> list[Lane]:
    """Run the ranks of a task.

    Args:
        task: The fields of `Program`, its function and arguments pickled; and ``ranks``, already checked.
        report: Called with the fraction done and the next step.

    Raises:
        PlanError: the program failed.
    """
    if missing := missing_hooks("plan.program"):
        raise PlanError(f"plan.run needs {', '.join(missing)}, which torch {torch.__version__} lacks: use plan.memory.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the program's: nobody reads them here
    logging.disable(logging.WARNING)
    options = dict(task)
    pickled, wanted, size = options.pop("function"), options.pop("ranks"), options["world_size"]
    recording = Recording()
    with on_fake_rank(recording, min(size, options["ranks_per_host"]), is_gpu=options["is_gpu"]):
        report(0.05, "importing the program")
        function, args = pickle.loads(pickled)
        program = Program(function, args, **options)
        gc.freeze()
        known: dict[int, RankRecord] = {}

        def run(ranks: Sequence[int]) -> Mapping[int, RankRecord]:
            if 0 not in known:  # the others need what its pipelines say
                known[0] = fork_map([partial(run_rank, program, recording, 0)])[0]
                recording.pipeline_steps = known[0].pipeline_steps
            todo = sorted(set(ranks) - known.keys())
            report(0.1 + 0.8 * len(known) / (len(known) + len(todo) + 1), f"running {len(todo)} of {size} ranks")
            records = fork_map([partial(run_rank, program, recording, rank) for rank in todo])
            known.update(zip(todo, records, strict=True))
            return known

        if wanted == "distinct":
            return distinct_ranks(size, run)
        if wanted == "all":
            return merged(run(range(size)))
        records = run(wanted)
        rest = tuple(rank for rank in range(size) if rank not in wanted)
        lanes = merged({rank: records[rank] for rank in wanted})
        return [Lane(lanes[0].record, (*lanes[0].ranks, *rest)), *lanes[1:]]
