"""Hugging Face Accelerate in cells, unmodified: ranks train together however the accelerator was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.needs("accelerate")

TRAIN = """%%distributed
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, TensorDataset

def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)

def trained(accelerator, dtype=torch.float64):
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for a, b in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(a), b)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    assert accelerator.gather(loss.detach().reshape(1)).shape == (2,)
    return flat(accelerator.unwrap_model(model))
"""

ALONE = """
batches = [(a, b) for _ in range(2) for a, b in zip(x.double().split(16), y.double().split(16))]
wanted = trained_alone(lambda p: torch.optim.SGD(p, lr=0.1), batches)
"""
"""Two micro-batches of 4 on two ranks are 16 samples a step."""


def test_accelerator_trains_all_ranks_however_created(two: Kernel) -> None:
    two.ok(TRAIN)
    reply = two.ok(
        f"""%%distributed
import sys
{ALONE}
def made_after_a_state():
    assert PartialState().num_processes == 2
    return Accelerator(gradient_accumulation_steps=2)

def made_without_the_variable():
    del os.environ["ACCELERATE_USE_CPU"]
    try:
        return Accelerator(gradient_accumulation_steps=2)
    finally:
        os.environ["ACCELERATE_USE_CPU"] = "true"

ways = {{
    "plain": lambda: Accelerator(gradient_accumulation_steps=2),
    "cpu=True": lambda: Accelerator(cpu=True, gradient_accumulation_steps=2),
    "cpu=False": lambda: Accelerator(cpu=False, gradient_accumulation_steps=2),
    "state": made_after_a_state,
    "variable": made_without_the_variable,
}}
from axon_nb.records.hooks import missing_hooks
assert missing_hooks("accelerate.state") == []
for name, make in ways.items():
    fresh()
    accelerator = make()
    assert (accelerator.num_processes, accelerator.process_index) == (2, rank), name
    assert accelerator.device == device and accelerator.is_main_process == (rank == 0), name
    between, off, moved = apart(trained(accelerator), wanted)
    assert between == 0 and off < 1e-12 < 0.01 < moved, (name, between, off, moved)
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
"""
    )
    assert reply.stdout + reply.stderr == "", "no warning"


def test_bfloat16_matches_one_process(two: Kernel) -> None:
    two.ok(TRAIN)
    two.ok(
        """%%distributed
fresh()
own = trained(Accelerator(mixed_precision="bf16"), torch.float32)

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for first, second in zip(zip(x.split(4)[0::2], y.split(4)[0::2]), zip(x.split(4)[1::2], y.split(4)[1::2])):
        for a, b in (first, second):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(a)
            (F.mse_loss(out.float(), b) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
batches = [(a, b) for _ in range(2) for a, b in zip(x.split(8), y.split(8))]
in_full = trained_alone(lambda p: torch.optim.SGD(p, lr=0.1), batches)
between, off, _ = apart(own, flat(model))
assert between == 0 and off < 1e-6, (between, off)
assert (own - in_full).abs().max() > 1e-5, "nothing was rounded"
"""
    )


def test_features_unavailable_on_cpus_are_reported(two: Kernel) -> None:
    two.ok(TRAIN)
    reply = two.ok(
        f"""%%distributed
from accelerate.utils import FullyShardedDataParallelPlugin
{ALONE}
fresh()
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
between, off, _ = apart(trained(accelerator), wanted)
assert accelerator.distributed_type.value == "MULTI_CPU" and between == 0 and off < 1e-12, (between, off)
del os.environ["ACCELERATE_USE_FSDP"]
fresh()
"""
    )
    reported = "axon_nb: Accelerate does not support FSDP on CPUs; it trains this model with DistributedDataParallel, "
    assert reported in reply.stdout
    assert all(reported in line for line in reply.lines())


def test_loaded_session_trains_as_the_saved_one(two: Kernel, tmp_path: Path) -> None:
    two.ok(
        TRAIN
        + """
fresh()
accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.arange(32.).reshape(8, 4) / 32, torch.ones(8, 1)), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
batches = list(loader)[:3]

def train():
    for a, b in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)
train()
"""
    )
    two.ok(f"%distributed save {tmp_path}/session")
    two.ok("%%distributed\nresult = train()")
    two.ok("%pull result")
    two.ok("wanted = result")
    two.ok(f"%distributed load {tmp_path}/session")
    two.ok("%%distributed\nassert vars(accelerator.gradient_state) is vars(optimizer.gradient_state)\nresult = train()")
    two.ok("%pull result")
    two.ok("assert (wanted[0] == result[0]).all() and (wanted[1] == result[1]).all()")


def test_replaced_rank_has_its_own_place_and_the_states_of_the_others(two: Kernel) -> None:
    two.ok(
        TRAIN
        + """
fresh()
accelerator = Accelerator(gradient_accumulation_steps=2)
model = net().double()
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
"""
    )
    two.run("%%distributed\nif rank == 1: os._exit(3)\ndist.barrier()")
    two.ok("%distributed repair --from 0")
    two.ok(
        "%%distributed\nassert (accelerator.process_index, accelerator.num_processes) == (rank, 2)\n"
        "assert optimizer.gradient_state.num_steps == 2\n"
        "assert vars(optimizer.gradient_state) is vars(accelerator.gradient_state)\noptimizer.step()"
    )


def test_aborted_step_can_be_rerun(two: Kernel) -> None:
    two.ok(TRAIN)
    two.ok(
        """%%distributed
fresh()
accelerator = Accelerator()
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(net().double()))
mine = slice(rank * 16, rank * 16 + 16)

def step(broken=False):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x[mine].double()), y[mine].double())
    if broken and rank == 1:
        raise ValueError("bug")
    accelerator.backward(loss)
    optimizer.step()
step()
"""
    )
    reply = two.run("%%distributed\nstep(broken=True)")
    assert "ValueError: bug" in reply.traceback
    two.ok(
        "%%distributed\nstep()\n"
        "wanted = trained_alone(lambda p: torch.optim.SGD(p, lr=0.1), [(x.double(), y.double())] * 2)\n"
        "between, off, _ = apart(flat(model), wanted)\nassert between == 0 and off < 1e-12, (between, off)"
    )


def test_launchers_call_the_function_on_every_rank(two: Kernel) -> None:
    two.ok(TRAIN)
    reply = two.ok(
        """%%distributed
import sys
from accelerate import debug_launcher, notebook_launcher
from axon_nb.records.hooks import missing_hooks
assert missing_hooks("accelerate.launch") == []

def train(word):
    fresh()
    accelerator = Accelerator()
    print(word, accelerator.num_processes, accelerator.mixed_precision)

notebook_launcher(train, ("notebook",), num_processes=2, mixed_precision="bf16")
debug_launcher(train, ("debug",), num_processes=4)
fresh()
"""
    )
    assert {line.partition("] ")[2] for line in reply.lines()} == {
        "notebook 2 bf16",
        "axon_nb: debug_launcher(4 processes) runs on the 2 ranks of this cell.",
        "debug 2 no",
    }


def test_dict_that_is_split_between_processes_stays_whole(two: Kernel) -> None:
    reply = two.ok("""%%distributed
from accelerate import PartialState
state, data = PartialState(), {"x": [1, 2, 3, 4]}
for _ in range(2):
    with state.split_between_processes(data) as part:
        print(len(part["x"]), data)
""")
    assert reply.lines() == ["[ranks 0-1] 2 {'x': [1, 2, 3, 4]}"] * 2


def test_gathered_dict_that_loses_its_values_is_named(two: Kernel) -> None:
    reply = two.ok("""%%distributed
from accelerate.utils import gather_object
gather_object({"acc": rank})""")
    assert "gather_object at line 3 returns the keys, without values: pass a list with the dict in it" in reply.shown()
    reply = two.ok('%%distributed\ngather_object([{"acc": rank}])')
    assert "axon_nb:" not in reply.shown()
    assert "[{'acc': 0}, {'acc': 1}]" in reply.shown()
