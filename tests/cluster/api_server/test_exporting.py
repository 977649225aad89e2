"""What courses are exported as is accepted by a real API server, and counted by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_pool.cli import main
from gpu_pool.cluster.dialects import choose
from gpu_pool.cluster.export import documents
from gpu_pool.courses import parse_course
from support.clusters import everything, hami
from support.control_plane import Cluster

from .conftest import ApiServer

COURSE = """\
title: ML
slices: [{name: Small, request: 2%}, {name: Large, request: 14%}]
quota: {slices: 10, share: 50%}
"""


@pytest.mark.parametrize("name", list(everything()))
def test_every_quota_is_accepted_as_it_is(name: str, api_server: ApiServer) -> None:
    dialect = choose(*everything()[name]).dialect
    assert dialect is not None
    for text in (COURSE, COURSE.replace("2%", "1")):
        course = parse_course("ml.yaml", text.encode())
        made, notes = documents({"ml": course}, dialect, "default", kueue=False)
        assert made or notes
        for each in made:
            path = "/api/v1/namespaces/default/resourcequotas?dryRun=All"
            status, stored = api_server.call("POST", path, each)
            assert status == 201, stored.get("message")
            assert stored["spec"]["hard"] == each["spec"]["hard"]


def test_a_cluster_is_asked_for_what_the_courses_become(
    cluster: Cluster, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.add(hami("export-1", count=50))
    file = tmp_path / "ml.yaml"
    file.write_text(COURSE)
    words = ["courses", "export", "--kubernetes", "--dialect", "hami", "--namespace", namespace]
    assert main([*words, "--kubeconfig", str(cluster.kubeconfig), str(file)]) == 0
    written, told = capsys.readouterr()
    assert "hami" in told
    cluster.kubectl("apply", "-f", "-", stdin=written)
    found = cluster.get("resourcequota", "gpu-pool-ml", "-n", namespace)
    assert found["spec"]["hard"] == {"limits.nvidia.com/gpucores": "20", "limits.nvidia.com/gpumem": "6550"}
    assert "LocalQueue" not in json.dumps(written)


def test_a_cluster_that_cannot_be_reached_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ml.yaml"
    file.write_text(COURSE)
    assert main(["courses", "export", "--kubernetes", "--kubeconfig", str(tmp_path / "none"), str(file)]) != 0
    assert "cluster" in capsys.readouterr().err.lower()


def test_a_bad_file_and_no_format_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ml.yaml"
    file.write_text("title: ML\n")
    assert main(["courses", "export", str(file)]) != 0
    assert "--kubernetes" in capsys.readouterr().err
    assert main(["courses", "export", "--kubernetes", str(file)]) != 0
    assert "ml.yaml has an error" in capsys.readouterr().err
