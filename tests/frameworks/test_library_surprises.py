"""What other libraries do on valid input and nobody expects: one sentence on ranks, or what they expected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

NEEDS = {
    "an array of Ray's": ["ray"],
    "event files of several ranks": ["tensorboard"],
    "a mean of counts": ["lightning_fabric"],
    "sources that alternate": ["datasets"],
    "text that stays": ["tensordict"],
    "entries of some elements": ["tensordict"],
    "columns of some files": ["pyarrow"],
    "a sum that stands still": ["torchmetrics"],
    "a loader with its own generator": ["torchdata"],
    "a sampler without its epoch": ["torchdata"],
}
"""The packages that it takes, where a plain installation lacks it."""

SAID = {
    "a tensor that shares a frame's memory": (
        """\
warnings.simplefilter('default')
import pandas as pd
torch.from_numpy(pd.DataFrame({'x': [1.0]})['x'].to_numpy())
warnings.simplefilter('ignore')""",
        "the tensor at line 4 shares memory with the array's frame and with frames made from it",
        "torch.tensor(pd.DataFrame({'x': [1.0]})['x'].to_numpy())",
    ),
    "a read-only array without a warning": (
        "import pandas as pd\ntorch.from_dlpack(pd.DataFrame({'x': [1.0]})['x'].to_numpy())",
        "the tensor at line 3 shares the memory of a read-only array",
        "torch.from_dlpack(pd.DataFrame({'x': [1.0]})['x'].to_numpy().copy()), torch.from_dlpack(torch.ones(1))",
    ),
    "an array of Ray's": (
        """\
import ray, numpy
stored = numpy.ones(2)
stored.flags.writeable = False  # as ray.get returns it
torch.from_dlpack(stored)""",
        "the tensor at line 5 shares the memory of a read-only array",
        "torch.from_dlpack(stored.copy())",
    ),
    "a Series and a tensor": (
        """\
import pandas as pd
(pd.Series([1, 2]) == torch.tensor([1, 2])).mean()""",
        "a pandas Series never equals a tensor at line 3",
        "(pd.Series([1, 2]) == torch.tensor([1, 2]).numpy()).mean(), pd.Series([1, 2]) == 1",
    ),
    "a Series as an index": (
        """\
warnings.simplefilter('default')
taken = torch.arange(6).reshape(2, 3)[pd.concat([pd.Series([0]), pd.Series([1])])]
warnings.simplefilter('ignore')""",
        "a pandas Series as an index at line 3 is taken apart if its labels repeat",
        """\
warnings.warn('of its own')
torch.arange(6).reshape(2, 3)[pd.Series([0, 1]).to_numpy()]""",
    ),
    "a tensor as a mask": (
        "pd.Series([1, 2]).iloc[torch.tensor([False, True])]",
        "iloc at line 2 takes a mask that is a tensor as positions 0 and 1",
        "pd.Series([1, 2]).iloc[torch.tensor([0, 1])], pd.Series([1, 2]).iloc[torch.tensor([True, False]).numpy()]",
    ),
    "event files of several ranks": (
        """\
from torch.utils.tensorboard import SummaryWriter
for _ in range(2):
    SummaryWriter(f'{logs}/runs').close()
    dist.barrier()""",
        "/runs at line 4, and a TensorBoard that is open shows one of them only",
        """\
for _ in range(2):
    SummaryWriter(f'{logs}/runs/{rank}').close()
    dist.barrier()""",
    ),
    "a mean of counts": (
        """\
from lightning_fabric import Fabric
fabric = Fabric(accelerator='cpu', devices=world_size, strategy='ddp')
fabric.launch()
fabric.all_reduce({'right': rank + 1})""",
        "Fabric.all_reduce at line 5 cuts the mean of integers to an integer: pass floats",
        "fabric.all_reduce({'right': rank + 1.0}), fabric.all_reduce(torch.tensor(rank), reduce_op='sum')",
    ),
    "sources that alternate": (
        """\
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
def mixed(**options):
    parts = [Dataset.from_dict({'text': [name] * 4}).to_iterable_dataset() for name in ('en', 'fr')]
    return interleave_datasets(parts, **options)
split_dataset_by_node(mixed(), rank=rank, world_size=2)""",
        "split_dataset_by_node at line 7 gives a rank examples of some of the 2 interleaved sources only",
        "split_dataset_by_node(mixed(probabilities=[0.5, 0.5], seed=0), rank=rank, world_size=2)",
    ),
    "text that stays": (
        """\
from tensordict import TensorDict
def transfer(**entries):
    one = TensorDict({'x': torch.full((2,), float(rank)), **entries}, [])
    one.recv(1) if rank == 0 else one.send(0)
    return one
transfer(name=f'of {rank}')""",
        "recv and all_reduce of a TensorDict at line 7 leave text as it was here, such as 'name'",
        "assert transfer()['x'].tolist() == [1.0, 1.0]",
    ),
    "entries of some elements": (
        """\
from tensordict import TensorDict
one, other = TensorDict({'loss': torch.ones(1)}, []), TensorDict({'loss': torch.ones(1), 'norm': torch.ones(1)}, [])
TensorDict.maybe_dense_stack([one, other]).contiguous()""",
        "contiguous() at line 4 drops what only some of the stacked TensorDicts have: norm",
        "TensorDict.lazy_stack([one, one.clone()]).contiguous()",
    ),
    "columns of some files": (
        """\
import pandas as pd
os.makedirs(f'{logs}/{rank}')
for number, names in enumerate((['loss'], ['loss', 'norm'])):
    pd.DataFrame({name: [1.0] for name in names}).to_parquet(f'{logs}/{rank}/{number}.parquet')
pd.read_parquet(f'{logs}/{rank}')""",
        "reading Parquet files at line 6 drops columns that the first file lacks: norm",
        "pd.read_parquet(f'{logs}/{rank}/1.parquet')",
    ),
    "a sum that stands still": (
        """\
from torchmetrics import SumMetric
count = SumMetric()
count.update(2**24)""",
        "SumMetric at line 4 has reached 2**24, where float32 drops single counts",
        "count = SumMetric().set_dtype(torch.float64)\ncount.update(2**24)\nSumMetric().update(5)",
    ),
    "a loader with its own generator": (
        """\
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
def loader(**options):
    return StatefulDataLoader(range(8), **options)
def resume(loader):
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
resume(loader(shuffle=True, generator=torch.Generator()))""",
        "StatefulDataLoader.load_state_dict at line 9 leaves the next epochs in another order than without a resume",
        """\
resume(loader(sampler=RandomSampler(range(8), generator=torch.Generator())))
resume(loader(shuffle=True))""",
    ),
    "a sampler without its epoch": (
        """\
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
def sampler(**options):
    return StatefulDistributedSampler(range(8), num_replicas=2, rank=rank, **options)
state = sampler().state_dict()
sampler().load_state_dict(state)""",
        "StatefulDistributedSampler at line 6 resumes in the order of epoch 0, as its state has no epoch",
        """\
informed = sampler()
informed.set_epoch(3)
informed.load_state_dict(state)
sampler(shuffle=False).load_state_dict(state)""",
    ),
}
"""By name: code that meets it, the sentence, and code in which all is as expected."""


@pytest.fixture(scope="module")
def told(two_ranks: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The shared kernel, with a folder for files of both ranks."""
    folder = str(tmp_path_factory.mktemp("logs"))
    two_ranks.ok(f"%%distributed\nimport warnings\nwarnings.simplefilter('ignore')\nlogs = {folder!r}")
    yield two_ranks
    two_ranks.ok("%%distributed\nwarnings.resetwarnings()")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.needs(*NEEDS.get(name, ()))) for name in SAID])
def test_one_sentence_says_so(told: Kernel, name: str) -> None:
    code, sentence, silent = SAID[name]
    reply = told.ok(f"%%distributed\n{code}")
    assert sentence in reply.shown(), reply.shown()
    assert reply.shown().count(sentence) <= 2, "once in each cell and rank"
    reply = told.ok(f"%%distributed\n{silent}")
    assert "axon_nb:" not in reply.shown()
