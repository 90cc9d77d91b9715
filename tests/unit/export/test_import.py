"""How scripts and cells are taken apart: what they bind and use, IPython's syntax, and the import of scripts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

from axon_nb import cli
from axon_nb.errors import UsageError
from axon_nb.export.effects import defining_statements, effects, live_cells
from axon_nb.export.translation import indent_code, one_statement_per_line, parse, translate
from axon_nb.script import ImportReport, import_script

PROGRAMS = Path(__file__).resolve().parents[2] / "support" / "programs"
TRAINS = "loss = model(x)\n    loss.backward()\n"

PREDEFINED = ("rank", "torch", "dist", "F")


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


def test_default_that_may_be_none_stays_none(tmp_path: Path) -> None:
    code = (
        "import argparse\nimport os\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--out', type=str, default=os.environ.get('NO_SUCH_VARIABLE'))\n"
        "args = parser.parse_args()\n"
    )
    text, _ = cut(tmp_path, code)
    space: dict[str, Any] = {}
    exec(text.replace("%%distributed", ""), space)
    assert space["args"].out is None
    exec(cut(tmp_path, code, "--out runs")[0].replace("%%distributed", ""), space)
    assert space["args"].out == "runs"


def test_parser_with_parents_keeps_its_words(tmp_path: Path) -> None:
    code = (
        "import argparse\n\n\ndef options():\n    parser = argparse.ArgumentParser(add_help=False)\n"
        "    parser.add_argument('--lr', type=float, default=0.5)\n    return parser\n\n\n"
        "parser = argparse.ArgumentParser('train', parents=[options()])\nargs = parser.parse_args()\nprint(args.lr)\n"
    )
    text, report = cut(tmp_path, code, "--lr 3")
    assert "sys.argv = ['train.py', '--lr', '3']" in text
    assert "args = parser.parse_args()" in text
    assert "sys.argv" in report.notes[0]


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


@pytest.mark.parametrize(
    ("cell", "python"),
    [
        ("!ls -l\n", "subprocess.run('ls -l', shell=True, check=False)\n"),
        ("!ls {folder}\n", "subprocess.run(f'ls {folder}', shell=True, check=False)\n"),
        ("%time x = f(1)\n", "x = f(1)  # timed by %time in the notebook\n"),
        ("%cd 'a folder'\n", "os.chdir('a folder')\n"),
        ("%env OMP_PROC_BIND=true\n", "os.environ['OMP_PROC_BIND'] = 'true'\n"),
        ("%matplotlib inline\nx = 1\n", "# %matplotlib inline: a script has no notebook to plot in\nx = 1\n"),
        ("x?\n", "# %pinfo x: interactive help\n"),
        ("%unheard of\n", "# %unheard of: has no counterpart in a script\n"),
        ("!echo $HOME\n", "# !echo $HOME: uses IPython variables; call subprocess.run instead\n"),
        ("if rank:\n    %who\n", "if rank:\n    pass  # %who: interactive only\n"),
        ("x = 100 % 7\n", "x = 100 % 7\n"),
    ],
)  # fmt: skip
def test_magics_are_translated_or_become_comments(cell: str, python: str) -> None:
    assert translate(cell).code == python
    parse(translate(cell).code)


def test_captured_output_and_its_import() -> None:
    python = translate("files = !ls\nlen(files)\n")
    assert python.imports == ("import subprocess",)
    assert python.code.startswith(
        "files = subprocess.run('ls', shell=True, check=False, capture_output=True, text=True)"
    )
    assert python.code.splitlines()[1] == "len(files)"


def test_lines_within_strings_are_not_indented() -> None:
    code = 'text = """first\nsecond\n  third"""\nif text:\n    more = f"""{text}\nlast"""\n'
    namespace: dict[str, str] = {}
    exec("if True:\n" + indent_code(code), namespace)
    assert namespace["text"] == "first\nsecond\n  third"
    assert namespace["more"] == "first\nsecond\n  third\nlast"


@pytest.mark.parametrize(
    ("crowded", "plain"),
    [
        ("a = 1; b = 2\n", "a = 1\nb = 2\n"),
        ("a = 1;\n", "a = 1\n"),
        ("if a: b = 2\n", "if a:\n    b = 2\n"),
        ("for x in y:\n    a = 1; b = 2\n", "for x in y:\n    a = 1\n    b = 2\n"),
        ("def f(x): return x\n", "def f(x):\n    return x\n"),
        (
            "# kept\na = 1  # too\n\n@d\ndef f(x):\n    return x\n",
            "# kept\na = 1  # too\n\n@d\ndef f(x):\n    return x\n",
        ),
        ("with open(a) as f:\n    pass\n", "with open(a) as f:\n    pass\n"),
        ("s = 'a;b'\n", "s = 'a;b'\n"),
    ],
)
def test_each_statement_gets_its_own_line(crowded: str, plain: str) -> None:
    assert one_statement_per_line(crowded, ast.parse(crowded)) == plain


def live(*cells: str, wanted: dict[int, list[str]] | None = None) -> list[bool]:
    return live_cells([ast.parse(cell) for cell in cells], wanted or {}, predefined=PREDEFINED)


def test_bound_used_and_changed_names() -> None:
    found = effects(ast.parse("import a.b\nfor i in x: y[i] += z.f(w, print(v))\nq = [k for k in m]").body)
    assert found.binds == {"a", "i", "q"}
    assert found.uses == {"x", "y", "z", "w", "v", "m"}
    assert found.changes == {"y", "z", "w"}


def test_loop_variables_of_comprehensions_are_local_on_every_python() -> None:
    code = "a = {k: v for k, v in m}\nb = {n for n in [[l for l in p] for p in q]}\ndef f(a=[i for i in j]): pass"
    assert effects(ast.parse(code).body).uses == {"m", "q", "j"}


def test_functions_use_names_of_the_enclosing_scope() -> None:
    found = effects(ast.parse("def f(a, *b):\n    c = a + d\n    return g(c, len(b))\nclass C(B):\n    e = f").body)
    assert found.binds == {"f", "C"}
    assert {"d", "g", "B"} <= found.uses
    assert not {"a", "b", "c", "len", "e"} & found.uses


def test_cells_that_nothing_depends_on_are_dead() -> None:
    assert live(
        "total = torch.ones(1)\ndist.all_reduce(total)",  # nobody asks for it
        "model = make()\noptimizer = torch.optim.SGD(model.parameters())",
        "print(model)",
        "for x in data: F.loss(model(x)).backward(); optimizer.step()",
        "print(sum(1 for p in model.parameters()))",
    ) == [False, True, False, True, True]


def test_abandoned_experiment_is_dead() -> None:
    train = "for x in data:\n    model(x).backward()\n    optimizer.step()"
    make = "model = make({})\noptimizer = SGD(model.parameters())"
    assert live(make.format(1), train, make.format(2), train, "score = test(model)") == [False, False, True, True, True]


def test_training_twice_is_live_both_times() -> None:
    train = "for x in data:\n    model(x).backward()\n    optimizer.step()"
    assert live("model = make()\noptimizer = SGD(model.parameters())", train, train) == [True, True, True]


def test_written_or_fetched_values_are_live() -> None:
    cells = ("a = 1", "torch.save(a, 'file')", "b = 2", "c = 3", "last = 0")
    assert live(*cells) == [True, True, False, False, True]
    assert live(*cells, wanted={2: ["b"]}) == [True, True, True, False, True]


def test_change_through_an_alias_counts() -> None:
    assert live("x = make()", "y = [x]", "y[0].append(1)", "print(x)") == [True, True, True, True]


def test_defining_statements_are_selected_individually() -> None:
    statements = ast.parse(
        "import numpy as np\nnoise = 3\nraw = np.arange(8)\nraw[0] = 5\nprint(noise)\n"
        "train, test = raw[:4], raw[4:]\nraw = None"
    ).body
    chosen, missing = defining_statements(["train"], statements)
    assert [ast.unparse(s) for s in chosen] == [
        "import numpy as np",
        "raw = np.arange(8)",
        "raw[0] = 5",
        "train, test = (raw[:4], raw[4:])",
    ]
    assert missing == set()
    assert defining_statements(["nowhere"], statements) == ([], {"nowhere"})
