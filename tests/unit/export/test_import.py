"""Import of scripts: how they are cut, what falls away, and what stays whole."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from axon_nb import cli
from axon_nb.errors import UsageError
from axon_nb.script import ImportReport, import_script

PROGRAMS = Path(__file__).resolve().parents[2] / "support" / "programs"
TRAINS = "loss = model(x)\n    loss.backward()\n"


def cut(folder: Path, code: str, arguments: str = "") -> tuple[str, ImportReport]:
    """The cells for ranks in one text, and the report."""
    script = folder / "train.py"
    script.write_text(code)
    report = import_script(script, arguments=arguments, force=True)
    return "\n".join(cell.text for cell in report.cells if cell.on_ranks), report


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_notebook_is_valid_and_its_cells_compile(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "n.ipynb"
    report = import_script(path, target)
    nbformat.validate(nbformat.read(target, as_version=4))
    for cell in report.cells:
        if cell.on_ranks:
            compile(cell.text.removeprefix("%%distributed\n"), "cell", "exec")


def test_main_is_opened_and_the_group_falls_away(tmp_path: Path) -> None:
    code = (
        "import torch.distributed as dist\n\n\ndef main(steps):\n    # the group\n    dist.init_process_group()\n"
        f"    # the model\n    model = make()  # small\n    {TRAINS}    dist.destroy_process_group()\n\n\n"
        'if __name__ == "__main__":\n    main(3)\n'
    )
    text, report = cut(tmp_path, code)
    assert "process_group" not in text
    assert "def main" not in text
    assert "__name__" not in text
    assert "steps = 3\n" in text
    assert "\n# the model\nmodel = make()  # small\n" in text
    assert not report.notes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"if x:\n        return\n    {TRAINS}", "it returns before its end"),
        (f"print(locals())\n    {TRAINS}", "it looks at its variables as a whole"),
        (f"scale = 2\n    {TRAINS}", "its variable scale would change that of the script"),
        (f"yield 1\n    {TRAINS}", "it is a generator"),
    ],
)
def test_function_stays_where_opening_it_could_change_the_script(tmp_path: Path, body: str, reason: str) -> None:
    code = f"scale = 1\n\n\ndef other():\n    return scale\n\n\ndef main():\n    {body}\n\nmain()\n"
    text, report = cut(tmp_path, code)
    assert report.notes == (f"main() stays a function, because {reason}.",)
    assert text.endswith("\nmain()")


def test_values_take_the_place_of_argparse(tmp_path: Path) -> None:
    code = (
        "import argparse\nimport os\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('epochs', type=int, help='how many')\n"
        "parser.add_argument('--lr', type=float, default='0.5')\n"
        "parser.add_argument('--fast', action='store_true')\n"
        "parser.add_argument('--port', type=int, default=os.environ.get('PORT', 1))\n"
        "args = parser.parse_args()\nprint(args)\n"
    )
    text, _ = cut(tmp_path, code, "3 --fast")
    assert (
        "args = argparse.Namespace(\n    epochs=3,  # how many\n    lr=0.5,\n    fast=True,\n"
        "    port=int(os.environ.get('PORT', 1)),\n)" in text
    )
    assert "parser" not in text
    text, report = cut(tmp_path, code)
    assert "epochs=None,  # required; how many" in text
    assert report.notes == ("Set epochs in its cell: the script requires a value.",)
    with pytest.raises(UsageError, match="invalid int value: 'x'"):
        cut(tmp_path, code, "x")


def test_other_command_lines_keep_their_words(tmp_path: Path) -> None:
    text, report = cut(tmp_path, "import fire\n\nfire.Fire(print)\n", "--a 'b c'")
    assert "sys.argv = ['train.py', '--a', 'b c']" in text
    assert "sys.argv" in report.notes[0]


def test_script_that_starts_processes_stays_whole(tmp_path: Path) -> None:
    code = "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=2)\n"
    text, report = cut(tmp_path, code)
    assert text == f"%%distributed\n{code.strip()}"
    assert "mp.spawn starts processes" in report.notes[0]


def test_files_beside_the_script_are_found_from_another_folder(tmp_path: Path) -> None:
    target = tmp_path / "n.ipynb"
    import_script(PROGRAMS / "trainer_class.py", target)
    assert f"sys.path.insert(0, '{PROGRAMS}')" in target.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("no.py", "no.py: No such file"), ("a.txt", "must end in .py"), ("bad.py", "bad.py, line 1: invalid syntax")],
)
def test_bad_input_gets_one_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("a b\n")
    assert cli.main(["import", words]) == 1
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_notebook_is_not_overwritten(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    import_script(script)
    with pytest.raises(UsageError, match="use `--force` to overwrite it"):
        import_script(script)
