"""What torch, Gloo and other libraries do on valid input and nobody expects: a right result on ranks, or a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel import Kernel

SETUP = """%%distributed
import copy, os, tempfile, warnings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
warnings.simplefilter("ignore")
paths = [tempfile.mkdtemp()]
dist.broadcast_object_list(paths)
folder = paths[0]
mesh = init_device_mesh("cpu", (2,))
rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
zeros = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])

class Scaled(nn.Module):
    def forward(self, x, scale=None):
        return x if scale is None else x * (scale[0] if isinstance(scale, list) else scale)

def run(module, rows, n=2, **kwargs):
    schedule = ScheduleGPipe(PipelineStage(module, rank, 2, torch.device("cpu")), n)
    schedule.step(*([torch.ones(rows, 4)] if rank == 0 else []), **(kwargs if rank == 0 else {}))
"""


@pytest.fixture(scope="module")
def gloo() -> Iterator[Kernel]:
    """A kernel with 2 ranks on Gloo."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok("%distributed start -n 2 --backend gloo")
        kernel.ok(SETUP)
        yield kernel
        kernel.run("%distributed stop")


RIGHT = {
    "sum of bools": (
        """\
t = torch.ones(2, dtype=torch.bool)
for _ in range(9):
    dist.all_reduce(t)
t.tolist()""",
        "[True, True]",
    ),
    "convolution of a split image": (
        """\
image, kernel = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
for tensor in (image, kernel.data):
    dist.broadcast(tensor, 0)
F.conv2d(image, kernel, padding=1).square().sum().backward()
same = []
for dim in (2, 3):
    weight = distribute_tensor(kernel.detach(), mesh, [Replicate()]).requires_grad_()
    result = F.conv2d(distribute_tensor(image, mesh, [Shard(dim)]), weight, padding=1)
    result.square().sum().backward()
    same += [torch.allclose(result.full_tensor(), F.conv2d(image, kernel, padding=1), atol=1e-5)]
    same += [torch.allclose(weight.grad.full_tensor(), kernel.grad, atol=1e-3)]
same""",
        "[True, True, True, True]",
    ),
    "another memory layout": (
        """\
t = torch.zeros(3, 2).t() if rank else torch.arange(6.0).view(2, 3)
dist.broadcast(t, 0)
u = torch.arange(6.0).view(2, 3)
u = u.t().contiguous().t() if rank else u
dist.all_reduce(u)
v = torch.arange(4.0)[::2]
dist.all_reduce(v)
t.flatten().tolist(), u.flatten().tolist(), v.tolist()""",
        "([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.0, 4.0])",
    ),
    "weights in channels_last": (
        """\
t = torch.arange(16.0).view(1, 4, 2, 2)
t = torch.zeros_like(t, memory_format=torch.channels_last) if rank else t
dist.broadcast(t, 0)
t.flatten().tolist() == list(range(16))""",
        "True",
    ),
    "maximum with NaN": (
        """\
found = []
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for sick in (0, 1):
        t = torch.arange(12, dtype=dtype)
        if rank == sick:
            t[::2] = float('nan')
        dist.all_reduce(t, dist.ReduceOp.MAX)
        found.append((int(t.isnan().sum()), t[11].item()))
set(found)""",
        "{(6, 11.0)}",
    ),
    "minimum with zeros of both signs": (
        """\
t = torch.tensor([0.0 if rank else -0.0, -1e-40 * rank, float('-inf'), 3.0 - rank])
work = dist.all_reduce(t, dist.ReduceOp.MIN, async_op=True)
while not work.is_completed():
    pass
[str(x) for x in t.tolist()], work.result()[0] is t""",
        "(['-0.0', '-9.99994610111476e-41', '-inf', '2.0'], True)",
    ),
    "maximum in a future": (
        """\
t = torch.tensor([float(rank)])
work = dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True)
work.get_future().wait()[0].item(), t.item()""",
        "(1.0, 1.0)",
    ),
    "parts of a maximum": (
        """\
t, parts = torch.zeros(1), [torch.tensor([1.0]), torch.tensor([float('nan') if rank else 2.0])]
dist.reduce_scatter(t, parts, dist.ReduceOp.MAX)
parts = [torch.zeros(1) for _ in range(2)]
dist.all_gather(parts, t)
[str(part.item()) for part in parts]""",
        "['1.0', 'nan']",
    ),
    "reduce keeps the others' values": (
        """\
t, u = torch.full((12,), 1.0 + rank), torch.full((12,), 1.0 + rank)
dist.reduce(t, 1)
dist.reduce(u, 1, dist.ReduceOp.AVG)
(set(t.tolist()), set(u.tolist())) == (({3.0}, {1.5}) if rank else ({1.0}, {1.0}))""",
        "True",
    ),
    "optimizer state before the first step": (
        """\
from torch.distributed.checkpoint.state_dict import get_state_dict
counts = []
for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    get_state_dict(model, optimizer)
    alone = copy.deepcopy(model)
    other = kind(alone.parameters(), lr=0.1)
    for m, o in ((model, optimizer), (alone, other)):
        m(torch.ones(1, 2)).sum().backward()
        o.step()
    counts.append(torch.equal(model.weight, alone.weight))
counts""",
        "[True, True, True]",
    ),
    "a checkpoint before the first step": (
        """\
from axon_nb.parallel import Checkpoints
model = nn.Linear(2, 2)
optimizer, alone = torch.optim.Adam(model.parameters(), lr=0.1), copy.deepcopy(model)
Checkpoints(f'{folder}/first').save(0, model=model, optimizer=optimizer)
for m, o in ((model, optimizer), (alone, torch.optim.Adam(alone.parameters(), lr=0.1))):
    m(torch.ones(1, 2)).sum().backward()
    o.step()
torch.equal(model.weight, alone.weight)""",
        "True",
    ),
    "a checkpoint with fewer rows than ranks": (
        """\
import torch.distributed.checkpoint as dcp
row = distribute_tensor(torch.arange(3.0)[None], mesh, [Shard(0)])
dcp.save({'row': row}, checkpoint_id=f'{folder}/row')
parts = {'row': distribute_tensor(torch.zeros(1, 3), mesh, [Shard(1)])}
whole = {'row': torch.zeros(1, 3)}
dcp.load(parts, checkpoint_id=f'{folder}/row')
dcp.load(whole, checkpoint_id=f'{folder}/row', no_dist=True)
parts['row'].full_tensor().tolist(), whole['row'].tolist()""",
        "([[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.0]])",
    ),
    "sources that differ between ranks": (
        """\
from torch.utils.cpp_extension import load_inline
source = '''#include <Python.h>
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "one", 0, -1, 0};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() {
    PyObject* made = PyModule_Create(&def);
    PyModule_AddIntConstant(made, "value", %d);
    return made;
}''' % (rank + 7)
os.environ['TORCH_EXTENSIONS_DIR'] = folder
dist.barrier()
load_inline('one', source, no_implicit_headers=True).value == rank + 7""",
        "True",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_result_is_right(gloo: Kernel, name: str) -> None:
    code, result = RIGHT[name]
    reply = gloo.ok(f"%%distributed\n{code}")
    assert f"[ranks 0-1] {result}" in reply.lines(), reply.shown()


def test_sum_of_bools_is_named_at_its_first_use(gloo: Kernel) -> None:
    reply = gloo.ok("""%%distributed
from axon_nb.comm.shared_memory.segment.pages import note_unlike_gloo
note_unlike_gloo.cache_clear()  # another test may have been the first
for _ in range(2):
    dist.all_reduce(torch.ones(2, dtype=torch.bool))""")
    wanted = "axon_nb: SUM of bool works on these ranks, but torchrun's Gloo computes other values: use MAX"
    assert 1 <= reply.stderr.count(wanted) <= 2, "once for each rank"


def test_average_of_integers_is_refused_before_it_is_a_sum(gloo: Kernel) -> None:
    reply = gloo.ok("""%%distributed
t = torch.tensor([1 + rank])
try:
    dist.all_reduce(t, dist.ReduceOp.AVG)
except Exception as error:
    print(error)
dist.barrier()
t.item() == 1 + rank""")
    assert "Gloo has no AVG of int64, and integers would lose the fraction: reduce a copy in floats" in reply.shown()
    assert "[ranks 0-1] True" in reply.lines()


def test_reduced_tensor_that_backward_needs_is_refused(gloo: Kernel) -> None:
    reply = gloo.run("""%%distributed
x = torch.ones(2, requires_grad=True)
y = x.exp()
dist.all_reduce(y.detach())
y.sum().backward()""")
    assert "has been modified by an inplace operation" in reply.traceback
    reply = gloo.ok("""%%distributed
y = x.exp()
dist.all_reduce(y.detach().clone())
if rank == 0:  # what it sends stays as it is
    dist.broadcast(y.detach(), 0)
else:
    dist.broadcast(torch.zeros(2), 0)
with torch.inference_mode():
    dist.all_reduce(torch.ones(2))
y.sum().backward()
x.grad.tolist()""")
    assert "[ranks 0-1] [2.7182817459106445, 2.7182817459106445]" in reply.lines()


SAID = {
    "gradient of a mean": (
        "F.mse_loss(rows.detach().requires_grad_(), zeros).backward()",
        "the gradient of mse_loss of sharded tensors at line 2 is 2 times too large",
        """\
(rows.detach().requires_grad_() - zeros).square().mean().backward()
F.mse_loss(rows.to_local().requires_grad_(), zeros.to_local()).backward()""",
    ),
    "average of averages": (
        """\
uneven = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
F.binary_cross_entropy_with_logits(uneven, torch.zeros_like(uneven))
F.mse_loss(uneven, torch.zeros_like(uneven))""",
        "mse_loss of sharded tensors at line 4 is an average of the ranks' averages, and their shards differ in size",
        """\
F.mse_loss(rows, zeros), F.l1_loss(uneven, torch.zeros_like(uneven))
F.mse_loss(uneven, torch.zeros_like(uneven), reduction="sum")
assert uneven.square().mean().full_tensor() == F.mse_loss(uneven.full_tensor(), torch.zeros(5, 2)) == 28.5""",
    ),
    "number of a part": (
        "print(rows.sum().item())",
        "a number taken from a sharded tensor at line 2, by item(), float() or bool(), is this rank's part only",
        "print(rows.sum().full_tensor().item(), rows.full_tensor().sum().item(), bool(rows.to_local().any()))",
    ),
    "shards that are drawn alike": (
        """\
def draw():
    with torch.device('meta'):
        layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device='cpu')
    layer.reset_parameters()
torch.manual_seed(0)
draw()""",
        "drew the same numbers into their shards, so the whole tensors repeat rows",
        """\
torch.manual_seed(rank)
draw()""",
    ),
    "Muon": (
        "torch.optim.Muon([nn.Parameter(rows)])",
        "torch.optim.Muon at line 2 works on sharded matrices in bfloat16, in parts",
        "torch.optim.Muon([nn.Parameter(torch.ones(4, 2))])",
    ),
    "file of another rank": (
        """\
if rank == 0:
    torch.save({'rows': rows}, f'{folder}/rows.pt')
dist.barrier()
torch.load(f'{folder}/rows.pt', weights_only=False)""",
        "torch.load at line 5 returned the shard of another rank",
        """\
torch.save(rows, f'{folder}/own{rank}.pt')
torch.load(f'{folder}/own{rank}.pt', weights_only=False)""",
    ),
    "keywords that are cut": (
        "run(Scaled(), 8, 4, scale=torch.arange(1.0, 5.0))",
        "scale of step() at line 2 is cut into microbatches along its first dimension (4)",
        """\
run(Scaled(), 8, 4, scale=[torch.arange(1.0, 5.0)])
run(Scaled(), 8, 4, scale=torch.ones(8, 1))""",
    ),
    "rows that do not divide": (
        "run(nn.Identity(), 5)",
        "a batch of 5 rows at line 2 does not divide into 2 microbatches",
        "run(nn.Identity(), 4)",
    ),
    "BatchNorm in a pipeline": (
        "run(nn.BatchNorm1d(4), 8)",
        "the first step() at line 2 runs each stage once more to find shapes, and BatchNorm counts it",
        """\
from axon_nb.parallel import Pipeline
stages = [nn.BatchNorm1d(4), nn.Linear(4, 4)]
Pipeline(stages, schedule='GPipe', loss=F.mse_loss).step(torch.ones(8, 4), torch.ones(8, 4))
run(nn.BatchNorm1d(4).eval(), 8)""",
    ),
    "hooks in a pipeline": (
        """\
layers = [nn.Linear(4, 4) for _ in range(4)]
def train():
    stages = [PipelineStage(layers[i], i, 4, torch.device('cpu')) for i in (rank, rank + 2)]
    [layer.zero_grad() for layer in layers]
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=F.mse_loss)
    schedule.step(torch.ones(8, 4)) if rank == 0 else schedule.step(target=torch.ones(8, 4))
train()
hooks = [layer.weight.register_post_accumulate_grad_hook(lambda weight: None) for layer in layers]
train()""",
        "ScheduleInterleavedZeroBubble at line 10 calls post-accumulate hooks of gradients on stage 0 only",
        """\
[hook.remove() for hook in hooks]
train()""",
    ),
    "gradients of an earlier step": (
        """\
def steps(number, **options):
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss, **options)
    for _ in range(number):
        schedule.step(torch.ones(8, 4)) if rank == 0 else schedule.step(target=torch.ones(8, 4))
steps(2)""",
        "step() at line 7 divides the gradients of earlier steps by 4 once more: pass scale_grads=False",
        """\
steps(2, scale_grads=False)
steps(1)""",
    ),
    "gradient of a maximum": (
        """\
from torch.distributed.nn import functional
own = torch.tensor([1.0 + rank], requires_grad=True)
functional.all_reduce(own, op=dist.ReduceOp.MAX)""",
        "the gradient of all_reduce with MAX at line 4 goes to the values of all ranks",
        """\
functional.all_reduce(own)
functional.all_reduce(own.detach(), op=dist.ReduceOp.MAX)
torch.stack(functional.all_gather(own)).amax(0).backward()
assert own.grad.item() == rank * dist.get_world_size()""",
    ),
    "rows of a sharded tensor": (
        """\
layer = nn.Embedding(4, 2)
fully_shard(layer, mesh=mesh)
with torch.no_grad():
    layer.weight[1].zero_()""",
        "a write to rows of a sharded tensor at line 5 is lost",
        """\
with torch.no_grad():
    layer.weight[:, 0].zero_()
    layer.weight.mul_(2).add_(layer.weight).copy_(rows)
layer(torch.tensor([1])).sum().backward()
torch.optim.AdamW(layer.parameters(), foreach=False).step()
assert layer.weight.full_tensor()[:, 0].abs().max() > 0""",
    ),
    "a BatchNorm of one's own": (
        """\
class Doubled(nn.BatchNorm1d):
    def forward(self, x): return 2 * super().forward(x)
nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Doubled(2), nn.Linear(2, 2)))""",
        "convert_sync_batchnorm at line 4 makes a plain SyncBatchNorm of Doubled, without its own forward",
        """\
converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), None)
assert type(converted[0]) is nn.SyncBatchNorm""",
    ),
    "tied weights of a traced pipeline": (
        """\
from torch.distributed.pipelining import SplitPoint, pipeline
class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight if tie else self.out.weight
    def forward(self, x):
        return self.out(self.middle(self.embed(x)))
def traced(tie):
    return pipeline(Tied(tie), (torch.zeros(2, 3).long(),), split_spec={"middle": SplitPoint.BEGINNING})
traced(True)""",
        "embed.weight and out.weight are one parameter, of which pipeline() at line 12 gives each stage a copy",
        "assert traced(False).num_stages == 2",
    ),
    "tied weights": (
        """\
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def split(plan):
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return parallelize_module(model, mesh, plan)
model = split({"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()})""",
        "0.weight and 1.weight were one parameter, and are a parameter each after parallelize_module at line 7",
        """\
model[1].weight = model[0].weight
assert len(list(model.parameters())) == 3
split({"2": ColwiseParallel()})""",
    ),
    "writes after an evaluation": (
        """\
layer = fully_shard(nn.Linear(2, 2), mesh=mesh)
with torch.no_grad():
    layer(torch.ones(1, 2))
    layer.weight.fill_(2)
layer(torch.ones(1, 2)).sum().backward()""",
        "weights under fully_shard that were written in place since their last forward have their old values again",
        """\
with torch.no_grad():
    layer(torch.ones(1, 2))
    layer.reshard()
    layer.weight.fill_(2)
layer(torch.ones(1, 2)).sum().backward()
assert bool((layer.weight.full_tensor() == 2).all())""",
    ),
    "rounded time steps": (
        """\
class Denoiser(nn.Linear):
    def forward(self, image, step):
        return super().forward(image)
half = torch.bfloat16
def run_model(step, **options):
    model = fully_shard(Denoiser(1, 1), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=half, **options))
    model(torch.ones(1, 1, dtype=half), step)
run_model(torch.tensor([999.0]))""",
        "rounds whole numbers among a module's arguments to torch.bfloat16, as 999 to 1000",
        """\
run_model(torch.tensor([999]))
run_model(torch.tensor([999.0]), cast_forward_inputs=False)
run_model(torch.tensor([128.0]))
run_model(torch.tensor([0.3]))""",
    ),
    "sum of norms": (
        "rows.norm(dim=0).sum()",
        "the sum of norms of a sharded tensor at line 2 is one norm of the ranks' sums, which is less",
        "rows.norm(), rows.norm(dim=0).full_tensor().sum(), rows.norm(dim=1).sum().full_tensor()",
    ),
    "ranks that any() counts": (
        "(rows >= 0).any(0).sum()",
        "any() of a sharded tensor at line 2, taken as a number, counts each rank",
        """\
assert (rows >= 0).int().amax(0).sum().full_tensor().tolist() == 2
(rows > 0).sum(), (rows > 0).float().mean(), (rows > 0).all(0).int()""",
    ),
    "gradient of an extreme": (
        "weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()\nweight.amax()",
        "the gradient of amax of a sharded tensor at line 3 is NaN or infinite",
        """\
weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
weight.detach().amax(), weight.amax(dim=1), weight.norm()
with torch.no_grad():
    weight.amax()
weight.max().backward()
assert weight.grad.full_tensor().sum() == 1""",
    ),
    "loaded into another type": (
        """\
import torch.distributed.checkpoint as dcp
dcp.save({'rate': torch.tensor([0.9])}, checkpoint_id=f"{folder}/rate")
dcp.load({'rate': torch.tensor([0])}, checkpoint_id=f"{folder}/rate")""",
        "`rate` at line 4 was saved as torch.float32 and is loaded into torch.int64, which cuts its values",
        """\
found = {'rate': torch.tensor([0.0], dtype=torch.bfloat16)}
dcp.load(found, checkpoint_id=f"{folder}/rate")
assert found['rate'].item() > 0.8""",
    ),
    "members of a group of others": (
        """\
other = dist.new_group([0])
if rank == 1:
    dist.get_process_group_ranks(other)""",
        "get_process_group_ranks at line 4 was asked of a group without this rank",
        """\
dist.get_process_group_ranks(dist.group.WORLD)
if rank == 0:
    dist.get_global_rank(other, 0)""",
    ),
    "parameter groups that are merged": (
        """\
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
model = nn.Linear(2, 2)
def apart():
    return torch.optim.AdamW([{'params': [model.weight]}, {'params': [model.bias], 'lr': 0.1}])
saved = get_optimizer_state_dict(model, apart())
set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), saved)""",
        "the optimizer state at line 7 was saved with 2 parameter groups, and this optimizer has 1",
        "set_optimizer_state_dict(model, apart(), get_optimizer_state_dict(model, apart()))",
    ),
    "state that became text": (
        """\
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
def back(name, state):
    torch.save(state, f'{folder}/{name}{rank}')
    torch_save_to_dcp(f'{folder}/{name}{rank}', f'{folder}/{name}{rank}.dcp')
    dcp_to_torch_save(f'{folder}/{name}{rank}.dcp', f'{folder}/{name}{rank}.back')
adam = torch.optim.Adam([torch.ones(1, requires_grad=True)])
adam.param_groups[0]['params'][0].sum().backward()
adam.step()
back('adam', {'adam': adam.state_dict()})""",
        "dcp_to_torch_save at line 10 turns the numbers in an optimizer's state into text",
        "back('model', nn.Linear(2, 2).state_dict())",
    ),
    "milestones that became text": (
        """\
weight = nn.Parameter(torch.ones(1))
back('rate', {'rate': torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight]), [2]).state_dict()})""",
        "dcp_to_torch_save at line 3 turns the milestones of a scheduler into text",
        "back('steps', {'rate': torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight]), 2).state_dict()})",
    ),
    "a step in safetensors": (
        """\
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
def save(name, step):
    writer = HuggingFaceStorageWriter(f'{folder}/{name}', save_distributed=True)
    dcp.save({'weight': rows, 'step': step}, storage_writer=writer)
save('number', 7)""",
        "HuggingFaceStorageWriter at line 7 puts step into a file of safetensors as bytes",
        "save('tensor', torch.tensor(7))",
    ),
    "safetensors of many ranks": (
        """\
from torch.distributed.checkpoint import HuggingFaceStorageWriter
HuggingFaceStorageWriter(folder)""",
        "HuggingFaceStorageWriter at line 3 writes the parts of all ranks to one file",
        "HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)",
    ),
}


RIGHT_FROM = {"ranks that any() counts": "2.14"}
"""From which torch on there is nothing to say."""


@pytest.mark.parametrize("name", SAID)
def test_one_sentence_says_so(gloo: Kernel, name: str) -> None:
    code, sentence, silent = SAID[name]
    reply = gloo.ok(f"%%distributed\n{code}")
    is_wrong = name not in RIGHT_FROM or torch.__version__ < RIGHT_FROM[name]
    assert (sentence in reply.shown()) == is_wrong, reply.shown()
    assert reply.shown().count(sentence) <= 2, "once in each cell and rank"
    reply = gloo.ok(f"%%distributed\n{silent}")
    assert "axon_nb:" not in reply.shown()
    assert "Hint:" not in reply.shown()


def test_missing_checkpoint_says_how_to_catch_it(gloo: Kernel) -> None:
    reply = gloo.run("""%%distributed
import logging
import torch.distributed.checkpoint as dcp
logging.disable(logging.CRITICAL)
try:
    dcp.load({"a": torch.zeros(2)}, checkpoint_id=f"{folder}/absent")
except Exception:
    pass""")
    assert "`except Exception` does not catch a CheckpointException" in reply.traceback


def test_experts_of_equal_size_are_not_mixed(gloo: Kernel) -> None:
    gloo.ok(
        "%%distributed\ntorch.manual_seed(0)\nclass Moe(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))\n"
        "    def forward(self, x, pick): return self.experts[pick](x)\n"
        "plain, moe = Moe(), Moe()\nmoe.load_state_dict(plain.state_dict())\n"
        "for expert in moe.experts:\n    fully_shard(expert, mesh=mesh)\n"
        "fully_shard(moe, mesh=mesh)\nx = torch.ones(2, 4)\nmoe(x, 0)"
    )
    reply = gloo.run("%%distributed\nmoe(x, rank)")
    place = r"rank \d is in the forward pass of an FSDP model at line 2 \(forward, .*\) in `experts\.\d`"
    assert re.search(f"Collective mismatch: {place}, rank \\d in another module or call, on the same", reply.traceback)
    assert "run the same modules (experts, blocks) on every rank" in reply.traceback
    code = "%%distributed\nmoe(x, 1).sum().backward()\nprint(torch.allclose(moe(x, 1), plain(x, 1)))"
    assert gloo.ok(code).lines() == ["[ranks 0-1] True"]
