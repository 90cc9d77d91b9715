"""A session in a folder: as many new ranks continue bit for bit, another number gets models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.script import Script

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "protected.py"
KINDS = ("ddp", "grid", "pipeline")
WEIGHTS = """
whole = [getattr(value, "full_tensor", lambda: value)() for value in model.state_dict().values()]
moments = [getattr(entry["exp_avg"], "full_tensor", lambda: entry["exp_avg"])() for entry in optimizer.state.values()]
[value.tolist() for value in (*whole, *moments)], decay.last_epoch
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script that saved sessions on 4 ranks, and stopped these; `expected` is how each training ends there."""
    folder = tmp_path_factory.mktemp("saved")
    with Script(folder) as script:
        script.ok("import axon_nb\nc = axon_nb.start(4, devices='cpu', name='saved')")
        script.ok("from axon_nb.cluster.transfer import load_session, save_session")
        script.ok(f"program = open({str(PROGRAM)!r}).read(); c.run(program); expected = dict()")
        for kind in (*KINDS, "fsdp"):
            build = f"build({kind!r}); train(3); squares = (n for n in ())"
            script.ok(f"c.run({build!r})")
            script.ok(f"said = save_session(c.cells, {kind!r}); weights = c.run({WEIGHTS!r}).values[0]")
            script.ok(f"c.run('train(6)'); expected[{kind!r}] = c.run('state()').values")
        yield script


@pytest.mark.timeout(480)
def test_as_many_ranks_continue_bit_for_bit(saved: Script) -> None:
    assert "Not saved: `squares` is a generator" in str(saved.value("said"))
    assert "Other numbers of ranks can load `model`." in str(saved.value("said"))
    saved.ok("c.stop(); c = axon_nb.start(4, devices='cpu', name='loaded')")
    for kind in KINDS:
        said = saved.ok(f"print(load_session(c.cells, {kind!r}))").out
        assert said.strip() == f"Loaded the session from {kind}: all variables and random states of 4 ranks."
        saved.ok("c.run('train(6)'); after = c.run('state()').values")
        assert saved.value(f"after == expected[{kind!r}]"), kind


@pytest.mark.timeout(480)
def test_another_number_of_ranks_gets_models_and_optimizers(saved: Script) -> None:
    saved.ok("c.stop(); c = axon_nb.start(2, devices='cpu', name='fewer')")
    assert (
        "Run the cells that create `model`, `optimizer`, `decay` first"
        in saved.run("load_session(c.cells, 'fsdp')").message
    )
    saved.ok("c.run(program); c.run('build(\"fsdp\"); train(1)')")
    said = saved.ok("print(load_session(c.cells, 'fsdp'))").out
    assert said.startswith("Loaded `model` from fsdp, which 4 ranks have saved. Other variables and random states stay")
    assert saved.value(f"c.run({WEIGHTS!r}).values[0] == weights")
    assert "is not a saved session" in saved.run("load_session(c.cells, 'nothing')").message
    assert (
        "exists and is not a saved session"
        in saved.run("import os; os.mkdir('other'); save_session(c.cells, 'other')").message
    )
