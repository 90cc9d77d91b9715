"""DistributedOptimizer: a torch optimizer that steps with gradients reduced over ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from axon_nb.compat.horovod.compression import Compression, Compressor
from axon_nb.compat.horovod.gradients import GradientReduction, How, Unit, check_names, make_units
from axon_nb.compat.horovod.runtime.errors import StepOrderError
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, global_process_set
from axon_nb.compat.horovod.runtime.reduce_ops import Op, chosen_op
from axon_nb.compat.horovod.runtime.state import current
from axon_nb.errors import UsageError

__all__ = ["DistributedOptimizer", "ReducingOptimizer"]


class ReducingOptimizer(torch.optim.Optimizer):
    """Mixin that `DistributedOptimizer` adds to the given optimizer's class."""

    _reduction: GradientReduction | None
    """None if there are no other ranks."""
    _plain: type[torch.optim.Optimizer]
    """The original class."""
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes per reduction."""
        return 1 if self._reduction is None else self._reduction.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of passes; only between a step and the next backward."""
        if self._reduction is not None:
            self._reduction.passes = _checked_passes(passes)
            self._reduction.forget()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them; then `step` within `skip_synchronize`."""
        if self._reduction is not None:
            self._reduction.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` skip the reduction, because `synchronize` was already called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all gradients are reduced, then step; a closure's gradients are reduced on each call."""
        if closure is not None:

            def reduced() -> Any:
                loss = closure()
                if self._should_synchronize:
                    self.synchronize()
                return loss

            self._synchronized = False
            result = super().step(reduced)
            self._synchronized = False
            return result
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    # torch wraps a class's `step` without this mark, for hooks and the profiler. Wrapping the inner one is enough, and
    # keeps the waiting here out of the step.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            StepOrderError: gradients are being reduced.
        """
        if self._reduction is not None and self._reduction.begun:
            raise StepOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the next backward counts as the first."""
        if self._reduction is not None:
            self._reduction.forget()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose gradients are reduced too."""
        super().add_param_group(param_group)
        reduction = vars(self).get("_reduction")
        if reduction is not None:
            number = len(self.param_groups) - 1
            for place, parameter in enumerate(self.param_groups[-1]["params"]):
                if parameter.requires_grad:
                    reduction.add(Unit(f"added.{number}.{place}", [parameter]))


def _checked_passes(passes: int) -> int:
    if passes <= 0:
        raise UsageError(f"backward_passes_per_step={passes}: backward_passes_per_step must be > 0.")
    return passes


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that its gradients are reduced over ranks during backward.

    Args:
        optimizer: Any torch optimizer; its parameters, state and options are shared.
        named_parameters: ``model.named_parameters()``; gradients are matched between ranks by name.
        compression: Compression of gradients for communication.
        backward_passes_per_step: Number of backward passes per reduction.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: With Average: gradients are divided by it before the sum and multiplied by it
            afterwards.
        num_groups: The older form of `groups`.
        groups: Number of groups, or lists of parameters reduced together; None reduces each separately.
        sparse_as_dense: Whether to send sparse gradients as dense ones.
        process_set: The participating ranks.

    Returns:
        An instance of a subclass of the optimizer's class, with `synchronize` and `skip_synchronize`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        NotSupportedError: Adasum.
        UsageError: duplicate or missing names, or invalid values.
    """
    chosen = chosen_op(op)
    if gradient_predivide_factor != 1.0 and chosen is not Op.AVERAGE:
        raise UsageError("gradient_predivide_factor not supported with op != Average: leave it out, or use Average.")
    if gradient_predivide_factor <= 0:
        raise UsageError(f"gradient_predivide_factor must be > 0; got {gradient_predivide_factor}.")
    passes = _checked_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named = check_names(optimizer, named_parameters)
    units = make_units(optimizer, named, groups)
    alone = len(current().hosts) == 1 or not process_set.included()
    how = How(compression, chosen, gradient_predivide_factor, sparse_as_dense, process_set)
    plain = optimizer._plain if isinstance(optimizer, ReducingOptimizer) else type(optimizer)
    made: Any = type(
        plain.__name__, (ReducingOptimizer, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__}
    )
    wrapped: Any = made.__new__(made)
    # Except `step`, which may be a scheduler's wrapper of the given optimizer's method.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._plain, wrapped._synchronized, wrapped._should_synchronize = plain, False, True
    wrapped._reduction = None if alone else GradientReduction(units, how, passes)
    return wrapped
