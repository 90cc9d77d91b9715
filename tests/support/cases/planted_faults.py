"""Faults in distributed programs, each with the module and the cause that `--compare` must name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A right program: what makes it, and the cell that is compared."""

    setup: str
    cell: str
    plain: str = ""
    """Name of the plain model; empty: each rank holds all of it."""


_STEP = "opt.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\nopt.step()\n"
_HAND = "opt.zero_grad()\ncriterion(model(x), y).backward()\nreduce_by_hand(model)\nopt.step()\n"
_PIPE = (
    "opt.zero_grad()\nmodel.step(x if model.is_first else None, y if model.is_last else None, criterion)\nopt.step()\n"
)
_OF_RANK = "x, y = share(rank)\nopt = optimizer_of(model.parameters())\n"
_OF_ALL = "plain = plain_model()\nx, y = share(0)\nopt = optimizer_of(model.parameters())\n"

PROGRAMS = {
    "DDP": Program("model = DistributedDataParallel(plain_model())\n" + _OF_RANK, _STEP),
    "by hand": Program("model = plain_model()\n" + _OF_RANK, _HAND),
    "FSDP2": Program(
        "model = plain_model()\nfor part in model: fully_shard(part)\nfully_shard(model)\nplain = plain_model()\n"
        + _OF_RANK,
        _STEP,
        "plain",
    ),
    "tensor": Program("model = split(plain_model(), dist.group.WORLD)\n" + _OF_ALL, _STEP, "plain"),
    "library": Program("model = split_by_library(plain_model(), dist.group.WORLD)\n" + _OF_ALL, _STEP, "plain"),
    "pipeline": Program(
        "whole = plain_model()\nmodel = Pipeline.from_modules([whole[0], whole[1], whole[2], nn.Tanh()], "
        "num_microbatches=6)\nplain = nn.Sequential(*plain_model(), nn.Tanh())\nx, y = share(0)\n"
        "opt = optimizer_of([*model.parameters(), nn.Parameter(torch.zeros(1))])\n",
        _PIPE,
        "plain",
    ),
    "2-D": Program(
        "model = DistributedDataParallel(split(plain_model(), tp_group), process_group=dp_group)\n"
        "plain = plain_model()\nx, y = share(rank // 2)\nopt = optimizer_of(model.parameters())\n",
        _STEP,
        "plain",
    ),
}


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    program: str
    what: str
    module: str
    """Start of the path that must be named."""
    cause: str
    setup: str = ""
    """Runs after the program's own."""
    change: tuple[str, str] = ("", "")
    """Text in the cell, and its replacement."""


_LOSS = ("loss = criterion(model(x), y)", "loss = criterion(model(x), y) * {}")
_HAND_CALL = "reduce_by_hand(model)"
_SCALED, _MISSING, _DOUBLED = "scaled by world size", "missing all-reduce", "doubled all-reduce"
_LR = ("opt.step()", "opt.param_groups[0]['lr'] *= world_size\nopt.step()")
_CLIP = ("opt.step()", "clip_locally(list(model.parameters()))\nopt.step()")
_TOKENS = ("criterion(model(x), y)", "F.cross_entropy(model(x), labels)")
_UNEQUAL = "x, y = share(rank, rows=2 + rank)"
_DROP = "model[0].drop.p = plain[0].drop.p = 0.5\ntorch.manual_seed(rank)"

FAULTS = [
    Fault("DDP", "loss multiplied by the world size", "0.", _SCALED, change=(_LOSS[0], _LOSS[1].format("world_size"))),
    Fault(
        "DDP", "loss divided by the world size", "0.", _SCALED, change=(_LOSS[0], _LOSS[1].format("(1 / world_size)"))
    ),
    Fault("DDP", "unequal parts, mean of means", "0.", "mean of means", _UNEQUAL),
    Fault("DDP", "unequal padding, mean of means", "0.", "mean of means", "x, labels = token_share(rank)", _TOKENS),
    Fault(
        "DDP",
        "BatchNorm",
        "1",
        "batch norm",
        "net = plain_model(); model = DistributedDataParallel(nn.Sequential(net[0], nn.BatchNorm1d(8), net[2]))\n"
        "opt = optimizer_of(model.parameters())",
    ),
    Fault(
        "DDP",
        "rank 2 out of sync",
        "1.up.weight",
        "out of sync",
        "with torch.no_grad(): model.module[1].up.weight.mul_(1.01 if rank == 2 else 1)",
    ),
    Fault(
        "DDP",
        "rank 1 does not update a bias",
        "1.down.bias",
        "not updated",
        "if rank == 1: opt = torch.optim.SGD([p for n, p in model.named_parameters() if '1.down.b' not in n], lr=0.1)",
    ),
    Fault(
        "DDP",
        "hook that sums",
        "0.",
        _SCALED,
        "model.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True)"
        ".get_future().then(lambda f: f.value()[0]))",
    ),
    Fault(
        "DDP",
        "hook that reduces nothing",
        "0.",
        _MISSING,
        "def keep(_, bucket):\n    done = torch.futures.Future()\n"
        "    done.set_result(bucket.buffer())\n    return done\n"
        "model.register_comm_hook(None, keep)",
    ),
    Fault(
        "DDP",
        "a parameter that DDP ignores",
        "1.up.weight",
        _MISSING,
        "net = plain_model()\n"
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ['1.up.weight'])\n"
        "model = DistributedDataParallel(net); opt = optimizer_of(model.parameters())",
    ),
    Fault("DDP", "learning rate times the world size", "0.", _SCALED, change=_LR),
    Fault("by hand", "sum not divided", "0.", _SCALED, change=(_HAND_CALL, "reduce_by_hand(model, divisor=1)")),
    Fault(
        "by hand", "divided twice", "0.", _SCALED, change=(_HAND_CALL, "reduce_by_hand(model, divisor=world_size**2)")
    ),
    Fault(
        "by hand",
        "one parameter left out",
        "1.norm.weight",
        _MISSING,
        change=(_HAND_CALL, "reduce_by_hand(model, skip=['1.norm.weight'])"),
    ),
    Fault(
        "by hand",
        "one parameter reduced twice",
        "2.bias",
        _SCALED,
        change=(_HAND_CALL, "reduce_by_hand(model, twice=['2.bias'])"),
    ),
    Fault("by hand", "nothing reduced", "0.", _MISSING, change=(_HAND_CALL, "pass")),
    Fault(
        "FSDP2", "loss multiplied by the world size", "0.", _SCALED, change=(_LOSS[0], _LOSS[1].format("world_size"))
    ),
    Fault("FSDP2", "one unit sums gradients", "1.", _SCALED, "model[1].set_gradient_divide_factor(1.0)"),
    Fault("FSDP2", "clipped by a local norm", "0.", "local clipping", change=_CLIP),
    Fault("FSDP2", "unequal parts, mean of means", "0.", "mean of means", _UNEQUAL),
    Fault("FSDP2", "unequal padding, mean of means", "0.", "mean of means", "x, labels = token_share(rank)", _TOKENS),
    Fault("FSDP2", "learning rate times the world size", "0.", _SCALED, change=_LR),
    Fault("FSDP2", "gradients never reduced", "0.", "no gradient", "model.set_requires_gradient_sync(False)"),
    Fault("tensor", "no sum in forward", "1.down", _MISSING, "model[1].down.fault = 'no sum'"),
    Fault("tensor", "two sums in forward", "0.down", _DOUBLED, "model[0].down.fault = 'two sums'"),
    Fault("tensor", "mean instead of sum", "1.down", _SCALED, "model[1].down.fault = 'mean'"),
    Fault("tensor", "bias before the sum", "0.down", "bias", "model[0].down.fault = 'bias before'"),
    Fault("tensor", "bias left out", "1.down", "bias", "model[1].down.fault = 'no bias'"),
    Fault("tensor", "no sum in backward", "1.up", _MISSING, "model[1].up.fault = 'no backward sum'"),
    Fault("tensor", "two sums in backward", "1.up", _DOUBLED, "model[1].up.fault = 'two backward sums'"),
    Fault("tensor", "a sum in backward too much", "1.down", _DOUBLED, "model[1].down.fault = 'backward sum'"),
    Fault("tensor", "dropout with the rank's seed", "0.drop", "dropout seed", _DROP),
    Fault(
        "tensor",
        "rank 1 out of sync",
        "1.norm.weight",
        "out of sync",
        "with torch.no_grad(): model[1].norm.weight.mul_(1.01 if rank == 1 else 1)",
    ),
    Fault("tensor", "clipped by a local norm", "0.", "local clipping", change=_CLIP),
    Fault(
        "library",
        "no sum in forward",
        "1.down",
        _MISSING,
        "one = model[1].down\none.forward = lambda x, one=one: F.linear(x, one.weight, None) + one.bias",
    ),
    Fault(
        "library",
        "no sum in backward",
        "0.up",
        _MISSING,
        "one = model[1].up\none.forward = one.local_features".replace("[1]", "[0]"),
    ),
    Fault(
        "pipeline",
        "loss multiplied by the microbatches",
        "0.",
        _SCALED,
        change=("is_last else None, criterion)", "is_last else None, lambda a, b: criterion(a, b) * world_size)"),
    ),
    Fault("pipeline", "clipped by a stage's norm", "0.", "local clipping", change=_CLIP),
    Fault(
        "pipeline",
        "a stage is not updated",
        "1.",
        "not updated",
        "if rank == 1: opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)",
    ),
    Fault("pipeline", "learning rate times the world size", "0.", _SCALED, change=_LR),
    Fault("2-D", "no sum in forward", "0.down", _MISSING, "model.module[0].down.fault = 'no sum'"),
    Fault("2-D", "bias before the sum", "1.down", "bias", "model.module[1].down.fault = 'bias before'"),
    Fault("2-D", "no sum in backward", "1.up", _MISSING, "model.module[1].up.fault = 'no backward sum'"),
    Fault(
        "2-D",
        "no averaging over replicas",
        "0.",
        _MISSING,
        "model = model.module; opt = optimizer_of(model.parameters())",
    ),
    Fault("2-D", "unequal parts, mean of means", "0.", "mean of means", "x, y = share(rank // 2, rows=2 + rank // 2)"),
    Fault(
        "2-D",
        "loss multiplied by the replicas",
        "0.",
        _SCALED,
        change=(_LOSS[0], _LOSS[1].format("(2 if world_size > 1 else 1)")),
    ),
]
