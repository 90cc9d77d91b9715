"""Other frameworks in cells: what they need on a rank is set when it joins, or when a cell imports them."""

from __future__ import annotations

import functools
from types import ModuleType

from axon_nb.compat import accelerate_launch, accelerate_state, deepspeed_setup, dynamo_rules, environment
from axon_nb.compat.on_import import after_import
from axon_nb.engine.groups import stepping, wrappers
from axon_nb.engine.session import RankSession

__all__ = ["install_frameworks"]


def install_frameworks(session: RankSession) -> None:
    """Have Accelerate, transformers and DeepSpeed find the ranks as they are; call it when the rank joins."""
    config = session.config
    environment.set_environment(config.device, local_rank=config.local_rank)
    if config.device == "cpu":
        synchronise = functools.partial(accelerate_state.synchronise_on_cpus, world_size=config.world_size)
        after_import("accelerate.state", synchronise)
    after_import("torch._dynamo.trace_rules", dynamo_rules.skip_axon_nb_code)
    launch = functools.partial(accelerate_launch.call_on_ranks, world_size=config.world_size)
    after_import("accelerate.launchers", launch)
    after_import("deepspeed.comm.torch", deepspeed_setup.skip_shm_all_reduce)

    def prepare_engine(module: ModuleType) -> None:
        stepping.count_as_step(deepspeed_setup.wrap_step(module, session.extras["steps"].end_of_step))
        wrappers.follow_engines()

    after_import("deepspeed.runtime.engine", prepare_engine)
