"""DeepSpeed in cells, unmodified: every stage trains as one process does, and goes on after an abort."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.needs("deepspeed")

SETUP = """%%distributed
import deepspeed

mine = slice(rank * 16, rank * 16 + 16)

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)

def engine_of(stage, *, accumulation=1, own=True, offload=False, **more):
    '''An engine whose optimizer is torch's, or DeepSpeed's by its config.'''
    config = {
        "train_micro_batch_size_per_gpu": 16 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "zero_force_ds_cpu_optimizer": not own,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000,
            "stage3_param_persistence_threshold": 30, "stage3_prefetch_bucket_size": 1000,
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        },
        **more,
    }
    model = net()
    if not own:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": False}}
    made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                optimizer=adam(model.parameters()) if own else None)
    return made[0]

def steps_of(engine, number, broken=None):
    dtype = next(engine.module.parameters()).dtype
    handle = None
    if broken is not None and rank == 1:
        fine = iter(range(engine.gradient_accumulation_steps() - 1))
        def boom(*_):
            if next(fine, None) is None:
                raise ValueError("bug")
        layer = engine.module[2]
        register = layer.register_forward_pre_hook if broken == "forward" else layer.register_full_backward_pre_hook
        handle = register(boom)
    try:
        for _ in range(number):
            for a, b in zip(x[mine].to(dtype).split(engine.train_micro_batch_size_per_gpu()),
                            y[mine].to(dtype).split(engine.train_micro_batch_size_per_gpu())):
                loss = F.mse_loss(engine(a).float(), b.float())
                engine.backward(loss)
                engine.step()
    finally:
        if handle is not None:
            handle.remove()

def weights(engine):
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return flat(engine.module)
    with deepspeed.zero.GatheredParameters(parameters):
        return flat(engine.module).clone()

wanted = trained_alone(adam, [(x, y)] * 3)
"""


@pytest.fixture(scope="module")
def prepared(two_ranks: Kernel) -> Kernel:
    """The shared kernel, once DeepSpeed is imported."""
    two_ranks.ok(SETUP)
    return two_ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stage_trains_as_one_process(prepared: Kernel, stage: int) -> None:
    prepared.ok(
        f"""%%distributed
for settings in ({{}}, {{"accumulation": 2, "offload": {stage > 0}}}):
    engine = engine_of({stage}, **settings)
    steps_of(engine, 3)
    between, off, moved = apart(weights(engine), wanted)
    assert between == 0 and off < 2e-6 < 0.01 < moved, (settings, between, off, moved)
"""
    )


@pytest.mark.parametrize(("stage", "where"), [(2, "backward"), (3, "backward")])
def test_aborted_step_can_be_rerun(prepared: Kernel, stage: int, where: str) -> None:
    _broken_and_made_again(prepared, stage, where, "accumulation=2")


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", "accumulation=2, offload=True", "bf16={'enabled': True}"])
@pytest.mark.parametrize(("stage", "where"), [(s, w) for s in range(4) for w in ("forward", "backward")])
def test_aborted_step_can_be_rerun_in_every_zero_stage(prepared: Kernel, stage: int, where: str, settings: str) -> None:
    if stage == 0:
        settings = settings.removesuffix(", offload=True")
    _broken_and_made_again(prepared, stage, where, settings)


def _broken_and_made_again(kernel: Kernel, stage: int, where: str, settings: str) -> None:
    """Bit for bit what a run has that nobody disturbed."""
    kernel.ok(
        f"%%distributed\nundisturbed = engine_of({stage}, {settings})\nsteps_of(undisturbed, 4)\n"
        f"engine = engine_of({stage}, {settings})\nsteps_of(engine, 2)"
    )
    for _ in range(2):
        reply = kernel.run(f"%%distributed\nsteps_of(engine, 1, broken={where!r})")
        assert "ValueError: bug" in reply.traceback
    kernel.ok(
        "%%distributed\nsteps_of(engine, 2)\nbetween, off, moved = apart(weights(engine), weights(undisturbed))\n"
        "assert between == off == 0 and moved > 0.01, (between, off, moved)"
    )


def test_deepspeed_has_the_hooks(prepared: Kernel) -> None:
    prepared.ok(
        """%%distributed
import importlib
from axon_nb.records.hooks import missing_hooks
from axon_nb.engine.live_objects import live_objects
backend = importlib.import_module("deepspeed.comm.torch")
assert missing_hooks("deepspeed.setup", backend=backend, engine=deepspeed.runtime.engine) == []
engines = live_objects(("deepspeed.runtime.engine", "DeepSpeedEngine"))[0]
engines = [*engines, engine_of(2)]
stages = {engine.zero_optimization_stage(): missing_hooks("deepspeed.reset", engine=engine) for engine in engines}
assert not any(stages.values()) and 2 in stages, stages
assert backend.build_shm_op() is None
"""
    )


def test_unrecoverable_engine_is_reported(prepared: Kernel) -> None:
    reply = prepared.run(
        "%%distributed\nfrom axon_nb.engine.groups.recovery import reset_wrappers\nodd = engine_of(2)\n"
        "del odd.micro_steps\n"
        "reset_wrappers()\nodd(x[mine])"
    )
    assert (
        "could not be reset after a cell was aborted (AttributeError: this DeepSpeed lacks engine.micro_steps): create"
        in reply.evalue
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_optimizer_is_built_and_offloaded(prepared: Kernel, stage: int) -> None:
    """DeepSpeed compiles its Adam for CPUs at the first use, with a C++ compiler and ninja: minutes on a busy one."""
    prepared.ok(
        f"""%%distributed
engine = engine_of({stage}, own=False, offload=True)
steps_of(engine, 3)
between, off, moved = apart(weights(engine), wanted)
assert between == 0 and off < 2e-4 < 0.01 < moved, (between, off, moved)
assert type(engine.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
""",
        timeout=1500,
    )
    _broken_and_made_again(prepared, stage, "backward", "own=False, offload=True")


@pytest.mark.slow
def test_engines_can_be_created_after_rank_replacement() -> None:
    from tests.frameworks.conftest import SETUP as COMMON
    from tests.frameworks.conftest import PatientKernel

    with PatientKernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok(COMMON)
        kernel.ok(SETUP)
        kernel.ok("%%distributed\nsteps_of(engine_of(2), 1)")
        reply = kernel.run("%%distributed\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()")
        assert "rank 1 was killed by SIGKILL" in reply.traceback
        kernel.ok("%distributed repair")
        kernel.ok(COMMON)
        kernel.ok(SETUP)
        kernel.ok(
            "%%distributed\nengine = engine_of(2)\nsteps_of(engine, 3)\n"
            "between, off, _ = apart(weights(engine), wanted)\nassert between == 0 and off < 2e-6, (between, off)"
        )
