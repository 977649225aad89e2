"""From a plain cluster to parked and prepared kernel pods, as docs/kubernetes/step-by-step.md says."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.kubelet.test_node_agent import PROGRAM
from support import installation
from support.guide import Guide
from support.images import ROOT
from support.installation import HERE, NAMESPACE, Installation, hand_over_images, one_machine, replacements
from support.jupyter_env import eventually
from support.kubelet import NODE, PAUSE, RealCluster
from support.notebook import NAMES
from support.nvml_stub import Machine
from support.student import LONG, Visit

# Images are built and everything is installed before the first of them.
pytestmark = pytest.mark.timeout(1800)

PAGE = "kubernetes/step-by-step.md"
AGENTS, AGENT = f"gpu-pool-{NAMESPACE}-agents", "gpu-pool-node-agent"
SMALL, WHOLE = NAMES[0], NAMES[-1]
LEASE, PREPARED = "jupyter-gpu-pool/lease", "jupyter-gpu-pool/prepared"


@pytest.fixture(scope="module")
def driver() -> Iterator[Path]:
    """Return a folder with a stand-in for the driver's library, which every user of the node can read."""
    made = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    made.chmod(0o755)
    # No process is on the GPU.
    Machine(made, "gpu GPU-gpu-0 Tesla V100-SXM2-32GB\nmemory 32768 0\n")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def installed(
    own_cluster: RealCluster, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Follow the page from its beginning to the end of step 5."""
    if why := installation.missing():
        pytest.skip(why)
    pytest.importorskip("grpc", reason="no grpcio, by which a kubelet asks drivers")
    from support.dra_driver import one_gpu

    cluster, folder = own_cluster, tmp_path_factory.mktemp("steps")
    mine = folder / "mine"
    mine.mkdir()
    guide = Guide(PAGE, cluster.kubeconfig, replaced(folder, mine))
    made = Installation(cluster, guide, mine, {}, guide)
    with one_gpu(cluster, "gpu-0"), one_machine(cluster, folder):
        cluster.kubectl("label", "node", NODE, "nvidia.com/gpu.present=true")
        try:
            follow(made, driver)
            yield made
        finally:
            cluster.kubectl("label", "node", NODE, "nvidia.com/gpu.present-")
            cluster.kubectl("delete", "namespace", AGENTS, "--ignore-not-found", "--timeout=120s")


def replaced(folder: Path, mine: Path) -> dict[str, str]:
    """Return what stands in the place of which texts of the page: docs/developer/cluster.md has why."""
    return {
        **replacements(folder),
        "my-cluster/login.yaml": f"{mine}/login.yaml --values {folder / HERE}",
        "my-cluster/": f"{mine}/",
        "dialects/shared.yaml \\": (
            f"dialects/shared.yaml --set config.KubernetesSettings.placeholder_image={PAUSE} \\"
        ),
        "kernel_cpu: 1 ": "kernel_cpu: 0.1 ",
        "kernel_cpu: 1\n": "kernel_cpu: 0.1\n",
        "kernel_memory: 4GiB": "kernel_memory: 1GiB",
        "yield_after: 60s": "yield_after: 5s",
        "[numpy, pandas]": "[json.tool]",
    }


def follow(made: Installation, driver: Path) -> None:
    for heading in ("What must be there", "1. Images"):
        made.printed[heading] = made.guide.follow(heading, ROOT)
    hand_over_images(made)
    for heading, file in (("2. The course", "ml.yaml"), ("4. JupyterHub", "login.yaml")):
        (made.folder / file).write_text(made.guide.file(heading, file))
    for heading in ("2. The course", "3. The service"):
        made.printed[heading] = made.guide.follow(heading, ROOT)
    give_driver(made.cluster, driver)
    for heading in ("4. JupyterHub", "5. Look at it"):
        made.follow(heading, ROOT)


def give_driver(cluster: RealCluster, driver: Path) -> None:
    """Let the agents find the stand-in, on a node that is in a pid namespace of its own."""
    daemon = cluster.get("daemonset", "-n", AGENTS, AGENT)
    metadata = {key: daemon["metadata"][key] for key in ("name", "namespace", "labels")}
    spec = daemon["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container["command"] = ["python3", "-c", PROGRAM, "node-agent"]
    container.setdefault("env", []).extend(
        [
            {"name": "LD_LIBRARY_PATH", "value": str(driver)},
            {"name": "NVML_STUB_SCENARIO", "value": str(driver / "scenario.txt")},
        ]
    )
    container["volumeMounts"].append({"name": "driver", "mountPath": str(driver), "readOnly": True})
    spec["volumes"].append({"name": "driver", "hostPath": {"path": str(driver)}})
    new = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": daemon["spec"]}
    # As Helm would: its next upgrade takes all of it back.
    flags = ("--server-side", "--force-conflicts", "--field-manager=helm")
    cluster.apply(new, flags=flags)


def kernels_of(installed: Installation, user: str) -> list[Any]:
    """Return the pods of somebody's kernels."""
    return [
        each
        for each in installed.kernels()
        if each["metadata"]["labels"]["jupyter-gpu-pool/user"] == user and LEASE in each["metadata"]["labels"]
    ]


def states(installed: Installation) -> list[str]:
    """Return the states of all leases."""
    return sorted(each["state"] for each in json.loads(installed.pool("status --json"))["leases"])


def test_what_the_page_lets_one_look_at(installed: Installation) -> None:
    *_, found = installed.printed["What must be there"]
    assert "the pool could claim 1 GPUs whole and divide them itself" in found
    (fits,) = installed.printed["2. The course"]
    assert "20 prepared pods" in fits
    *_, doctor, health = installed.printed["5. Look at it"]
    assert "broken" not in doctor
    assert "1 of 1 nodes with GPUs have an agent whose reports are taken" in doctor
    for said in (doctor, health):
        assert "ml: 0 of at most 20 ready. No notebook server of the course runs." in said


async def test_the_second_student_begins_in_a_prepared_pod_and_lends_the_slice_while_idle(
    installed: Installation, visit: Visit
) -> None:
    ada, grace = await visit("ada"), await visit("grace")
    await ada.start_server("ml")
    async with ada.notebook(SMALL) as first:
        assert await first.prints("print(6 * 7)") == "42\n"
        (ordinary,) = await asyncio.to_thread(kernels_of, installed, "ada")
        assert PREPARED not in ordinary["metadata"]["labels"]
        await grace.start_server("ml")
        pods, health = "6. What a student sees", "exec deploy/gpu-pool -- gpu-pool health"
        typed = {each.strip(): each for each in installed.guide.commands(pods)}
        look, said, status = typed.values()
        assert health in said

        async def is_ready() -> bool:
            told = await asyncio.to_thread(installed.guide.type, said, ROOT)
            return "prepared pods: ml: 1 of at most 20 ready (node-1: 1)" in told

        await eventually(is_ready, within=LONG)
        assert "gpu-pool-prepared-" in await asyncio.to_thread(installed.guide.type, look, ROOT)
        async with grace.notebook(SMALL) as second:
            assert await second.prints("kept = 'of grace'; print(kept)") == "of grace\n"
            (begun,) = await asyncio.to_thread(kernels_of, installed, "grace")
            assert PREPARED in begun["metadata"]["labels"]
            async with ada.notebook(WHOLE) as whole:
                cell = whole.run("print('on the whole GPU')")
                await cell.shows("Waiting for a whole GPU.")
                assert (await cell.done(within=LONG)).outputs == ["on the whole GPU\n"]
                assert "parked" in await asyncio.to_thread(installed.guide.type, status, ROOT)
                assert await asyncio.to_thread(states, installed) == ["held", "parked", "parked"]
            assert await second.prints("print(kept)") == "of grace\n"
            (still,) = await asyncio.to_thread(kernels_of, installed, "grace")
            assert still["metadata"]["uid"] == begun["metadata"]["uid"]
            back = installed.guide.commands("Go back")
            assert [each.split()[1] for each in back] == [
                "upgrade",
                "upgrade",
                "uninstall",
                "uninstall",
                "get",
            ]
            for each in back[:2]:
                await asyncio.to_thread(installed.guide.type, each, ROOT)
                await asyncio.to_thread(installed.wait)
            assert await second.prints("print(kept)") == "of grace\n"
            found = installed.cluster.get("daemonsets", "--all-namespaces")["items"]
            assert AGENT not in {each["metadata"]["name"] for each in found}


def test_it_is_taken_away_as_the_page_says(installed: Installation) -> None:
    hub, service, claims = installed.guide.commands("Go back")[2:]
    for each in (hub, service):
        installed.guide.type(each, ROOT)
    kinds = "deployments,daemonsets,roles,clusterroles,clusterrolebindings,validatingadmissionpolicies"
    left = installed.cluster.get(kinds, "--all-namespaces")["items"]
    names = [each["metadata"]["name"] for each in left]
    assert [each for each in names if each.startswith(("gpu-pool", "hub"))] == []
    asyncio.run(
        eventually(
            lambda: asyncio.to_thread(installed.guide.type, claims, ROOT),
            lambda found: "gpu-pool-device" not in found,
            within=LONG,
        )
    )
