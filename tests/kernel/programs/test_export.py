"""`%distributed export` of a running session: what ran on ranks is in the script, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.support.kernel import FreshCluster


def test_script_has_the_cells_that_ran_on_ranks(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("t_size = 3\n%push t_size")
    kernel.ok("%%distributed --ranks 1\nfirst = t_size + 1\nprint(first)")
    kernel.ok("%distributed auto on --ranks 0")
    kernel.ok("second = 2\n%distributed config\nprint(second)")
    kernel.ok("%%local\nhere = 4")
    kernel.ok("%distributed auto off")
    assert kernel.run("%%distributed\nthird = 3\nraise ValueError('stop')\nlost = 5").ename == "CellError"
    kernel.ok("%%distributed\nprint(third)")
    kernel.ok("get_ipython().run_cell('%%distributed\\nnested = 6')\nplain = 7")
    script = tmp_path / "train.py"
    kernel.ok(f"%distributed export {script}")
    text = script.read_text(encoding="utf-8")
    assert "--t-size" in text
    assert "%%distributed --ranks 1\nif rank == 1:\n    first = t_size + 1\n    print(first)\n" in text
    assert "%%distributed --ranks 0\nif rank == 0:\n    second = 2\n" in text
    assert "third = 3\n# Failed here in the notebook at line 2 (" in text
    assert "# lost = 5\n" in text
    assert not [name for name in ("here", "nested", "plain") if f"{name} = " in text]
