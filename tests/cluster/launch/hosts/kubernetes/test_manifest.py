"""The manifest of docs/howto/kubernetes.md, run as a pod would, and the Job that `--hosts k8s` makes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from axon_nb.cli import main
from axon_nb.host.schedulers.k8s import make_job, read_template
from axon_nb.host.schedulers.serving import Refused
from axon_nb.records.environment import HOST_IP, JOIN_KEY, K8S_TEMPLATE
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


REQUEST: dict[str, Any] = {
    "namespace": "team",
    "folder": "/tmp/axon_nb-0/f00",
    "hosts": {"k8s-0": 4, "k8s-1": 2},
    "gpus_per_rank": 1,
    "join": "127.0.0.1:4000",
    "ports": [4000, 4001],
    "key": "4711-0815",
}


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the user gets from the program and has changed."""
    assert main(["host", "--k8s-template"]) == 0
    changed = yaml.safe_load(capsys.readouterr().out)
    container = changed["spec"]["template"]["spec"]["containers"][0]
    container |= {"image": "team/axon", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(changed))
    monkeypatch.setenv(K8S_TEMPLATE.name, str(path))
    return read_template(None)


def test_job_has_what_the_template_says_and_what_its_host_needs(template: dict[str, Any]) -> None:
    before = copy.deepcopy(template)
    job = make_job(template, REQUEST, "k8s-1", None)
    assert template == before, "it serves the other hosts, too"
    assert job["metadata"]["name"] == "axon-nb-f00-1"
    assert "ownerReferences" not in job["metadata"]
    assert job["spec"]["template"]["metadata"]["labels"] == job["metadata"]["labels"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    assert words == ["axon-nb", "host", "--join", "127.0.0.1:4000", "--name", "k8s-1", "--tunnel", "4000", "4001"]
    assert [one["name"] for one in container["env"]] == ["NCCL_DEBUG", JOIN_KEY.name, HOST_IP.name]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}, "requests": {"cpu": "2"}}
    assert REQUEST["key"] not in str(job)


def test_resources_of_the_template_are_kept(template: dict[str, Any]) -> None:
    own = {"limits": {"cpu": "16", "nvidia.com/gpu": "8"}}
    template["spec"]["template"]["spec"]["containers"][0]["resources"] = own
    job = make_job(template, REQUEST, "k8s-0", None)
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {**own, "requests": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: Job\nspec: {}\n", "KeyError: 'template'"),
        ("kind: Pod\nspec: {template: {spec: {containers: [{}]}}}", "ValueError: kind is Pod"),
        ("kind: [", "while parsing a flow node"),
        ("", "'NoneType' object is not subscriptable"),
    ],
)
def test_bad_template_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    monkeypatch.setenv(K8S_TEMPLATE.name, str(path))
    with pytest.raises(Refused) as caught:
        read_template(None)
    assert f"as `axon-nb host --k8s-template` prints; {path}: " in str(caught.value)
    assert reason in str(caught.value)
    monkeypatch.setenv(K8S_TEMPLATE.name, str(tmp_path / "none.yaml"))
    with pytest.raises(Refused, match="No such file or directory"):
        read_template(None)


def test_template_without_an_image_is_refused_outside_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(K8S_TEMPLATE.name, raising=False)
    with pytest.raises(Refused, match=r"Run `axon-nb host --k8s-template > job\.yaml`, name the image there"):
        read_template(None)
