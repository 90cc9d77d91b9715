"""The parts of a rank's memory and of a module's, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one rank at one moment, by purpose."""

    parameters: int = 0
    """The rank's shards between steps."""
    gradients: int = 0
    optimizer: int = 0
    """Optimizer states of the parameters' shapes."""
    activations: int = 0
    """Inputs, tensors that forward saves for backward, their gradients, and temporaries."""
    unsharded: int = 0
    """FSDP's unsharded parameters while a unit computes, and their gradients until they are reduced."""
    communication: int = 0
    """Buffers of collectives: all-gather, reduce-scatter, DDP buckets, and tensors received by pipeline stages."""
    other: int = 0
    """The model's buffers, step counters, and temporaries of the optimizer's step."""
    fragmentation: int = 0
    """Allowance for memory that the allocator cannot use; not a prediction."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    def with_allowance(self, share: float) -> MemoryParts:
        """The same with a fragmentation allowance, a fraction of everything else."""
        bare = replace(self, fragmentation=0)
        return replace(bare, fragmentation=round(share * bare.total))

    def as_dict(self) -> dict[str, int]:
        """Bytes by part."""
        return {part: getattr(self, part) for part in PARTS}


PARTS = tuple(item.name for item in fields(MemoryParts))
"""The parts, in order."""


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Bytes on one rank that belong to one module, without its submodules."""

    name: str
    """Its name in the model as given; empty: the model itself."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Made by its forward and still alive at the rank's peak."""
