"""The manifest of docs/howto/kubernetes.md: its command, run in a network namespace as a pod would run it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from axon_nb.cli import main
from axon_nb.records.environment import JOIN_KEY
from tests.cluster.launch.second_host import network, start_with_joined_host, why_not
from tests.support.script import Script

PAGE = Path(__file__).resolve().parents[5] / "docs" / "howto" / "kubernetes.md"
POD = "axon-nb-agents-0"
IN_A_POD = f"""
import shlex

def far(command):
    setting, address = command.split()[0], command.split()[-1]
    secret = {{"key": setting.partition("=")[2], "address": address}}
    container = json.loads(CONTAINER)
    env = {{entry["name"]: secret[entry["valueFrom"]["secretKeyRef"]["key"]] for entry in container["env"]}}
    words = [re.sub(r"\\$\\((.*?)\\)", lambda name: env[name[1]], word) for word in container["command"]]
    env |= {{"PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"], "HOME": "/", "HOSTNAME": "{POD}"}}
    env |= {{name: value for name, value in os.environ.items() if name.startswith("AXON_NB_")}}  # of the tests
    env |= {{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}}
    pod = shlex.join(["env", "-i", *(f"{{name}}={{value}}" for name, value in env.items()), *words])
    move = ["ip", "netns", "exec", os.environ["AXON_NB_TEST_NAMESPACE"], "unshare", "--uts", "sh", "-c"]
    return [*move, f"hostname {POD}; exec {{pod}}"]
"""


def _documents() -> list[dict[str, Any]]:
    text = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    return list(yaml.safe_load_all(text))


def _container() -> dict[str, Any]:
    (container,) = _documents()[0]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_command_and_environment_of_the_manifest_are_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    container = _container()
    program, *words = container["command"]
    assert program == "axon-nb"
    assert {entry["name"] for entry in container["env"]} == {JOIN_KEY.name, "JOIN_ADDRESS"}
    monkeypatch.delenv(JOIN_KEY.name, raising=False)
    assert main([word.replace("$(JOIN_ADDRESS)", "10.0.0.1:40123") for word in words]) == 1
    assert "The cluster's key is missing" in capsys.readouterr().err  # its options were accepted


def test_pods_of_the_manifest_may_talk_to_each_other() -> None:
    job, policy = _documents()
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    (source,) = policy["spec"]["ingress"][0]["from"]
    (expression,) = source["podSelector"]["matchExpressions"]
    assert labels[expression["key"]] in expression["values"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


def test_ranks_run_where_the_command_of_the_manifest_runs(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    where = IN_A_POD.replace("CONTAINER", repr(json.dumps(_container())))
    with network() as link, Script(tmp_path, **link.environment) as script:
        script.ok("import json, re\n" + start_with_joined_host(where, link.interface), timeout=230)
        cell = "import os, socket\nt = torch.ones(3)\ndist.all_reduce(t)\n(socket.gethostname(), t[0].item())"
        values = script.value(f"dict(c.run({cell!r}).values)")
        assert [values[rank] == (POD, 4.0) for rank in range(4)] == [False, False, True, True]
        script.ok("c.stop()")
        assert script.value("joined.wait(60)") == 0, "the Job is complete"
