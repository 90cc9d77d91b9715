"""The Job that `--hosts k8s` makes from a template, and bad templates: needs no Kubernetes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from axon_nb.cli import main
from axon_nb.host.schedulers.k8s import make_job, read_template
from axon_nb.host.schedulers.serving import Refused
from axon_nb.records.environment import HOST_IP, JOIN_KEY, K8S_TEMPLATE

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
