"""Bad input of each command: one sentence with the fix on standard error, no traceback, exit status 2 for bad usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb import __version__
from axon_nb.cli import main
from tests.doctor.command import axon_nb

COMMANDS = [
    "class",
    "course",
    "doctor",
    "export",
    "help",
    "host",
    "import",
    "list",
    "quickstart",
    "stop",
    "status",
    "stacks",
    "explain",
    "vars",
    "diff",
    "rename",
    "interrupt",
    "repair",
    "logs",
    "run",
    "push",
    "pull",
    "plan",
    "mcp",
    "skill",
]
USAGE = {
    "": f"axon-nb needs a command: one of {', '.join(COMMANDS)}.",
    "lsit": "axon-nb has no command 'lsit': did you mean `axon-nb list`?",
    "frobnicate": "axon-nb has no command 'frobnicate': `axon-nb --help` lists all.",
    "--versoin": "axon-nb has no '--versoin'; did you mean --version?",
    "doctor --jsn": "axon-nb doctor has no '--jsn'; did you mean --json?",
    "doctor now": "axon-nb doctor does not accept 'now'; see `axon-nb doctor --help`.",
    "list --each": "axon-nb list has no '--each'; options are -h, --help, --json, --all.",
    "list mine": "axon-nb list does not accept 'mine'; see `axon-nb list --help`.",
    "stop --frce": "axon-nb stop has no '--frce'; did you mean --force?",
    "stop one two": "axon-nb stop does not accept 'two'; see `axon-nb stop --help`.",
    "export": "axon-nb export: the following arguments are required: NOTEBOOK, SCRIPT; see `axon-nb export --help`.",
    "export a.ipynb b.py --forc": "axon-nb export has no '--forc'; did you mean --force?",
}


@pytest.mark.parametrize(("typed", "sentence"), USAGE.items(), ids=lambda text: text or "nothing")
def test_bad_usage_is_one_sentence(typed: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr() == ("", f"{sentence}\n")


FAILS = {
    "stop nobody": "axon-nb stop: no cluster named 'nobody' on this host.",
    "stop nobody --all": "axon-nb stop: give NAME or --all, not both.",
}


@pytest.mark.parametrize(("typed", "sentence"), FAILS.items())
def test_impossible_request_is_rejected_in_one_sentence(
    typed: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXON_NB_RUNTIME_DIR", str(tmp_path))
    assert main(typed.split()) == 1
    assert capsys.readouterr() == ("", f"{sentence}\n")


def test_missing_notebook_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export", str(tmp_path / "no.ipynb"), str(tmp_path / "no.py")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("axon-nb: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("asked", ["-h", "--help", "help"])
def test_help_names_every_command(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"usage: axon-nb {command} ")
    assert f"Example: axon-nb {command} " in out


@pytest.mark.parametrize("asked", ["-V", "--version"])
def test_version(asked: str) -> None:
    done = axon_nb(asked)
    assert (done.code, done.out, done.err) == (0, f"axon_nb {__version__}\n", "")
