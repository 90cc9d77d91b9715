"""What a program finds on a fake rank: variables of torchrun, streams with a virtual clock, and DDP's reduction.

Programs are written for CUDA and NCCL, or for Gloo. There is no device: moves to CUDA are ignored, and `torch.cuda`'s
streams and events only note who waits for whom. FSDP2 takes its streams from `torch.cpu`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.plan.program.pipelines import PipelineAnswers
from axon_nb.plan.program.streams import Recording, stream_names
from axon_nb.torch_api import torch_api


def set_variables(rank: int, size: int, ranks_per_host: int) -> None:
    """Set the environment variables that torchrun sets.

    Args:
        rank: The rank in the world.
        size: The size of the world.
        ranks_per_host: The number of ranks per host, for the local rank.
    """
    local = min(size, ranks_per_host)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip


@contextlib.contextmanager
def on_fake_rank(recording: Recording, num_devices: int, *, is_gpu: bool) -> Iterator[None]:
    """Inside, programs that are unpickled find what they would find on a rank.

    Args:
        recording: Where their waits are recorded.
        num_devices: Ranks per host.
        is_gpu: Whether collectives run beside the program, as on GPUs.
    """
    with contextlib.ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        def swap_everywhere(function: Any, value: Any) -> None:
            name = function.__name__
            for module in list(sys.modules.values()):
                if vars(module).get(name) is function:
                    swap(module, name, value)

        for function in (dist.init_process_group, dist.destroy_process_group):
            swap_everywhere(function, _unless_running(recording, function))
        swap_everywhere(device_mesh.init_device_mesh, functools.partial(_named_mesh, device_mesh.init_device_mesh))
        swap_everywhere(torch.compile, _uncompiled)
        for function, answer in _OBJECT_COLLECTIVES.items():
            swap_everywhere(function, answer)
        _patch_distributed(swap, recording)
        PipelineAnswers(recording).install(swap, swap_everywhere)
        _patch_devices(swap, recording, num_devices, is_gpu=is_gpu)
        stack.enter_context(torch_api().static_stages())
        hooks = [register_optimizer_step_post_hook(lambda optimizer, *_: recording.current.end_step(optimizer))]
        if is_gpu:
            hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _use_foreach(optimizer)))
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _patch_distributed(swap: Any, recording: Recording) -> None:
    handle = import_module("torch._C._distributed_c10d").FakeWork
    wait = handle.wait

    def waited(self: Any, *args: Any) -> Any:
        recording.current.wait(self)
        return wait(self, *args)

    swap(handle, "wait", waited)
    ddp = import_module("torch.nn.parallel.distributed")
    swap(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None)  # it reads the other ranks' values
    swap(vars(dist)["Reducer"], "_rebuild_buckets", lambda _: False)  # it reads the order in which rank 0 was ready
    swap(DistributedDataParallel, "__init__", _ddp_init(DistributedDataParallel.__init__, recording))


def _named_mesh(make: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    with fake_tensor.unset_fake_temporarily():  # a mesh holds rank numbers
        mesh: DeviceMesh = make("cpu", *args, **kwargs)
        return mesh


def _mesh_of_groups(make: Any, group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    with fake_tensor.unset_fake_temporarily():
        mesh: DeviceMesh = make(group, "cpu", *args, **kwargs)
        return mesh


def _all_gather_object(everyone: list[Any], obj: Any, group: Any = None) -> None:
    everyone[:] = [obj] * dist.get_world_size(group)


def _gather_object(obj: Any, everyone: list[Any] | None = None, *_: Any, group: Any = None, **__: Any) -> None:
    if everyone is not None:
        _all_gather_object(everyone, obj, group)


def _scatter_object_list(output: list[Any], parts: list[Any] | None, *_: Any, group: Any = None, **__: Any) -> None:
    output[0] = None if parts is None else parts[dist.get_rank(group)]


_OBJECT_COLLECTIVES: dict[Any, Any] = {
    dist.all_gather_object: _all_gather_object,
    dist.broadcast_object_list: lambda *_, **__: None,
    dist.gather_object: _gather_object,
    dist.scatter_object_list: _scatter_object_list,
}
"""Objects cannot be exchanged: other ranks are taken to have the same."""


def _unless_running(recording: Recording, function: Any) -> Any:
    """Have a function do nothing while a program runs: its world exists already, and outlives it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if recording.log is None else None

    return called


def _ddp_init(init: Any, recording: Recording) -> Any:
    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device_ids", "output_device")}
        init(self, *args[:1], **kwargs)
        group = self.process_group

        def reduce(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            buffer.div_(group.size())
            recording.current.wrap("ddp", len(bucket.parameters()))
            recording.current.wait_after_backward(dist.all_reduce(buffer, group=group, async_op=True))
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future

        reduce.__annotations__.clear()  # DDP compares them
        # The fake group's all-reduce does not return what DDP expects.
        self.register_comm_hook(None, reduce)

    return made


def _patch_devices(swap: Any, recording: Recording, num_devices: int, *, is_gpu: bool) -> None:
    make_mesh = DeviceMesh.__init__

    def mesh(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        make_mesh(self, "cpu", *args, **kwargs)

    swap(DeviceMesh, "__init__", mesh)
    swap(DeviceMesh, "from_group", staticmethod(functools.partial(_mesh_of_groups, DeviceMesh.from_group)))
    for name, value in (
        ("set_device", lambda *_: None),
        ("current_device", lambda: 0),
        ("device_count", lambda: num_devices),
        ("synchronize", lambda *_: recording.current.synchronize()),
        ("empty_cache", lambda: None),
        ("get_rng_state", lambda *_: None),
        ("set_rng_state", lambda *_: None),
        ("manual_seed", lambda *_: None),
        ("manual_seed_all", lambda *_: None),
    ):
        swap(torch.cuda, name, value)
    streams = stream_names(recording)
    for module in (torch.cuda, torch.cpu) if is_gpu else (torch.cuda,):
        for name, value in streams.items() if module is torch.cuda else list(streams.items())[:-1]:
            swap(module, name, value)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function


def _use_foreach(optimizer: Any) -> None:
    """Use the kernels for many tensors, as torch does on GPUs."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
