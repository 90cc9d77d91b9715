"""Ranks die at any place of a step; after the repair, training goes on bit for bit as if nobody had died."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.script import Script

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "protected.py"
STEPS = 6
STATUS = "from axon_nb.cluster.inspection.status import ClusterStatus, cluster_info"


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with 4 protected ranks."""
    with Script(tmp_path_factory.mktemp("protected")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(4, devices='cpu', name='protected')")
        script.ok("from axon_nb.cluster.session import current\nsettings = current.session().settings")
        script.ok(f"settings.set('protect=on'); program = open({str(PROGRAM)!r}).read(); c.run(program)")
        yield script


def undisturbed(script: Script, kind: str) -> None:
    """Train without a death; `expected` is how it ends."""
    build = f"build({kind!r})"
    script.ok(f"c.run({build!r}); c.run('train({STEPS})'); expected = c.run('state()').values")


def hit(script: Script, kind: str, place: str, ranks: list[int], at: int = 3) -> str:
    """Kill ranks in a step, repair and train to the end; return the report of the repair."""
    build, doomed = f"build({kind!r})", f"train({STEPS}, {place!r}, {at}) if rank in {ranks} else train({STEPS})"
    script.ok(f"c.run({build!r}); failed = c.run({doomed!r}, check=False)")
    assert script.value("[rank for rank, error in failed.errors.items() if error.kind == 'died']") == ranks
    report = script.ok("print(c.repair())").out
    script.ok(f"c.run('train({STEPS})'); after = c.run('state()').values")
    assert script.value("after == expected"), script.value("after, expected")
    return report


@pytest.mark.timeout(480)
def test_training_after_a_death_equals_an_undisturbed_run(protected: Script) -> None:
    undisturbed(protected, "ddp")
    report = hit(protected, "ddp", "between", [1])
    assert report.strip() == "Replaced rank 1. All ranks are back at step 3: 1 step must be repeated."
    hit(protected, "ddp", "save", [0])
    assert "protected: step 6" in protected.ok(f"{STATUS}; print(repr(ClusterStatus(cluster_info(c.state))))").out


@pytest.mark.timeout(480)
def test_sharded_training_after_a_death_equals_an_undisturbed_run(protected: Script) -> None:
    undisturbed(protected, "fsdp")
    hit(protected, "fsdp", "step", [2])
    hit(protected, "fsdp", "save", [1, 3])


@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", ["grid", "pipeline", "three_d", "zero"])
def test_sharded_states_of_two_dead_ranks_come_back(protected: Script, kind: str) -> None:
    undisturbed(protected, kind)
    hit(protected, kind, "step", [2, 3])


@pytest.mark.timeout(480)
def test_model_built_again_on_an_equal_mesh_uses_its_own_groups(protected: Script) -> None:
    undisturbed(protected, "grid")
    for dead in (3, 0):
        hit(protected, "grid", "between", [dead])


STEP_TWO_FIRST = """
one, two = (torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(2))
two.step()
one.step()
"""
NUMBERS = """
from axon_nb.engine.session import current
{report.name: report.number for report in current().steps.report()}
"""


def test_optimizers_of_a_replacement_have_the_numbers_of_the_others(protected: Script) -> None:
    protected.ok(f"c.run({STEP_TWO_FIRST!r}); c.run('pass'); c.repair([2])")
    numbers = protected.value(f"list(c.run({NUMBERS!r}).values.values())")
    assert isinstance(numbers, list)
    assert numbers[2] == numbers[0]
    assert numbers[2]["two"] < numbers[2]["one"]


def test_what_is_not_protected_is_named_once(protected: Script) -> None:
    protected.ok("c.run('squares = (n * n for n in range(3))')")
    assert "Not protected: `squares` is a generator, which stays with its process." in shown(protected, "1")
    assert "Not protected" not in shown(protected, "del squares")


def shown(script: Script, code: str) -> str:
    """What a cell shows."""
    answer = script.ok(f"c.run({code!r})")
    return answer.out + answer.err


def test_without_a_common_step_new_ranks_are_empty(protected: Script) -> None:
    protected.ok("settings.set('protect=off'); c.run('x = 1')")
    assert "Replaced rank 1: new and empty" in protected.ok("print(c.repair([1]))").out
    protected.ok("settings.set('protect=on'); c.run(program)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero", "tensor", "grid", "pipeline"])
def test_random_deaths_lose_nothing(protected: Script, kind: str, part: int) -> None:
    """Eleven deaths; together 216 of one rank and 48 of two, 72 in `optimizer.step` and 48 within a save."""
    choice = random.Random(f"{kind} {part}")
    places = choice.sample(["step", "save", "between"], 11, counts=[3, 2, 6])
    counts = choice.sample([1, 2], 11, counts=[9, 2])
    undisturbed(protected, kind)
    for place, count in zip(places, counts, strict=True):
        hit(protected, kind, place, sorted(choice.sample(range(4), count)), choice.randrange(STEPS))
