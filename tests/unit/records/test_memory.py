"""Memory setups: fields from a page's input, and mesh axes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from axon_nb.errors import UsageError
from axon_nb.records.memory import WITH_MOMENTUM, HasClassName, LazyFunction, MemorySetup, changed


def test_page_input_changes_some_fields() -> None:
    before = MemorySetup(4, "full_shard", 4, batch=2)
    after = changed(before, {"world_size": "16", "strategy": "hybrid_shard", "activation_checkpointing": True})
    assert after == MemorySetup(16, "hybrid_shard", 4, batch=2, activation_checkpointing=True)
    assert before.mesh == {"dp": 4}
    assert after.mesh == {"replicate": 4, "shard": 4}
    assert changed(before, {}) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"world_size": "0"}, "ranks: '0': must be an integer from 1 to 1,000,000"),
        ({"batch": "2.5"}, "samples per rank: '2.5': must be an integer"),
        ({"batch": ""}, "samples per rank: '': must be an integer"),
        ({"world_size": True}, "ranks: True: must be an integer"),
        ({"activation_checkpointing": "yes"}, "activation_checkpointing='yes': must be True or False"),
        ({"colour": 1}, "'colour' is unknown; fields are activation_checkpointing, batch, cpu_offload, dtype"),
    ],
)
def test_invalid_input_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(MemorySetup(), given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replica_size_must_divide_the_ranks() -> None:
    with pytest.raises(UsageError, match="hybrid_shard: 3 ranks per replica do not divide 8 ranks; use 4, for example"):
        _ = MemorySetup(8, "hybrid_shard", 3).mesh
    with pytest.raises(UsageError, match="16 ranks per replica exceed the 8 available"):
        _ = MemorySetup(8, "hybrid_shard", 16).mesh


def test_momentum_is_a_separate_optimizer() -> None:
    assert MemorySetup(optimizer=WITH_MOMENTUM).optimizer_arguments == ("sgd", {"momentum": 0.9})
    assert MemorySetup(optimizer="adamw").optimizer_arguments == ("adamw", {})


def test_lazy_functions_are_pickled_without_their_modules() -> None:
    join = pickle.loads(pickle.dumps(LazyFunction("posixpath", "join")))
    assert join("a", "b") == "a/b"
    assert pickle.loads(pickle.dumps(HasClassName(("int",))))(3)
    assert not HasClassName(())(3)
