"""Translation of IPython syntax to plain Python, and formatting of cells for a script."""

from __future__ import annotations

import ast

import pytest

from axon_nb.export.translation import indent_code, one_statement_per_line, parse, translate


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
