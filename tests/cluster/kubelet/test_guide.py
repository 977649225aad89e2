"""JupyterHub and the pool installed as the administrator's page says, and a student who uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect
from tornado.httpclient import AsyncHTTPClient

from support import installation
from support.browsers import browser, chromium
from support.frontend import Cell
from support.images import name_of
from support.installation import NAMESPACE, PASSWORD, Installation, installing
from support.jupyter_env import eventually
from support.kubelet import NODE, RealCluster
from support.notebook import NAMES, run_cell, start_notebook
from support.student import LONG, Student, Visit

__all__ = ["browser", "chromium"]

# Images are built and everything is installed before the first of them.
pytestmark = pytest.mark.timeout(1800)

#: Python on 2%, as the launcher shows it.
KERNEL = NAMES[0]
#: Ends as soon as its home has the file.
UNTIL_TOLD = """
import pathlib, time
x = 41
print('begun', flush=True)
while not pathlib.Path('go-on').exists():
    time.sleep(0.1)
print(x + 1)
"""
#: What is told of a service that is away.
AWAY = "The GPU pool does not answer at the moment."


@pytest.fixture(scope="module")
def installed(own_cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Install everything, by the words of the page."""
    if why := installation.missing():
        pytest.skip(why)
    with installing(own_cluster, tmp_path_factory.mktemp("guide")) as made:
        yield made


async def leases(installed: Installation) -> int:
    """Return how many leases are held, as the administrator reads in the service's container."""
    status = json.loads(await asyncio.to_thread(installed.pool, "status --json"))
    return len(status["leases"])


async def returned(installed: Installation) -> None:
    """Wait until no kernel and no lease is left."""

    async def is_so() -> bool:
        return not await asyncio.to_thread(installed.kernels) and await leases(installed) == 0

    await eventually(is_so, within=LONG)


def test_what_the_page_lets_one_look_at(installed: Installation) -> None:
    *_, found, listed = installed.printed["What must be there"]
    assert "hami" in found
    assert "655MiB" in found
    assert "node-1" in listed
    (fits,) = installed.printed["3. Courses"]
    assert "intro-ml" in fits
    pods, log, gpus, address = installed.printed["6. Look at it"]
    assert {line.split()[2] for line in pods.splitlines()[1:]} == {"Running"}
    assert "hami" in log
    assert "V100" in gpus
    assert installed.url.removeprefix("http://") in address


def test_the_doctor_finds_nothing_missing(installed: Installation) -> None:
    (said,) = installed.guide.follow("When it does not work", installed.folder)
    found = {line.split()[1] for line in said.splitlines() if line.startswith("ok ")}
    installation = {"namespace:", "courses:", "store:", "rights:", "network:", "hub:", "token:", "service:"}
    assert installation <= found, said


async def test_a_student_runs_a_cell_on_two_percent_and_everything_is_given_back(
    installed: Installation, visit: Visit
) -> None:
    student = await visit("ada")
    page = await student.spawn_page()
    assert "Introduction to Machine Learning" in page
    assert "Research" not in page
    await student.start_server("intro-ml")
    async with student.notebook(KERNEL) as notebook:
        assert await notebook.prints("print(6 * 7)") == "42\n"
        assert await notebook.prints("import os; print(os.environ['GPU_POOL_SLICE'])") == "2%\n"
        (pod,) = await asyncio.to_thread(installed.kernels)
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpumem"] == "655"
        # It is in a pod of its own, with the home of its server.
        assert pod["metadata"]["name"] in await notebook.prints("import socket; print(socket.gethostname())")
        await notebook.prints("_ = open('mine.txt', 'w').write('kept')")
        assert await student.files() == ["mine.txt"]
        assert await leases(installed) == 1
        assert "2%" in (await student.open("/services/gpu-pool/")).body.decode()
    await returned(installed)


async def test_a_service_that_starts_anew_is_not_noticed_in_a_notebook(
    installed: Installation, visit: Visit
) -> None:
    student = await visit("grace")
    await student.start_server("intro-ml")
    async with student.notebook(KERNEL) as notebook:
        assert await notebook.prints("x = 41") == ""
        cell = notebook.run("import time; print('begun', flush=True); time.sleep(20); print(x + 1)")
        await cell.shows("begun")
        words = installed.guide.says("kubectl -n jupyterhub rollout restart deploy/gpu-pool")
        await asyncio.to_thread(installed.guide.type, words, installed.folder)
        await asyncio.to_thread(installed.wait)
        assert "".join((await cell.done(within=LONG)).outputs) == "begun\n42\n"
        assert await leases(installed) == 1
    await returned(installed)


@contextmanager
def image_away(installed: Installation) -> Iterator[None]:
    """Keep the image of kernels from the node, so that none starts."""
    name, kept = name_of("notebook"), "localhost/kept:1"
    images = partial(installed.cluster.ctr, "images")
    images("tag", name, kept)
    images("rm", name)
    try:
        yield
    finally:
        images("tag", kept, name)
        images("rm", kept)


@contextmanager
def service_away(installed: Installation) -> Iterator[None]:
    """End the service's pod and let no machine have the next one, so that it comes back in the end."""
    selector = "app.kubernetes.io/name=gpu-pool"
    installed.cluster.kubectl("cordon", NODE)
    try:
        installed.cluster.kubectl("delete", "pod", "-n", NAMESPACE, "-l", selector)
        yield
    finally:
        installed.cluster.kubectl("uncordon", NODE)
        installed.wait()


@contextmanager
def gpu_drained(installed: Installation) -> Iterator[None]:
    """Let whoever asks for a slice wait in the queue."""
    installed.pool("drain 0")
    try:
        yield
    finally:
        installed.pool("undrain 0")


def device_of(installed: Installation) -> Any:
    """Return how the one GPU is."""
    (device,) = json.loads(installed.pool("status --json"))["devices"]
    return device


async def test_while_the_service_is_moved_who_waits_reads_why_and_nothing_is_lost(
    installed: Installation, visit: Visit
) -> None:
    ada, grace = await visit("ada"), await visit("grace")
    for each in (ada, grace):
        await each.start_server("intro-ml")
    async with AsyncExitStack() as notebooks:

        async def begin(student: Student, code: str, told: str) -> Cell:
            notebook = await notebooks.enter_async_context(student.notebook(KERNEL))
            cell = notebook.run(code)
            await cell.shows(told)
            return cell

        runs = await begin(ada, UNTIL_TOLD, "begun")
        with image_away(installed):
            starts = await begin(ada, "print('started')", "software cannot be fetched at the moment")
            with gpu_drained(installed):
                waits = await begin(grace, "print('granted')", "Waiting for a GPU slice of 2%.")
                with service_away(installed):
                    asks = await begin(grace, "print('asked')", AWAY)
                    for each in (starts, waits):
                        await each.shows(f"{AWAY} Still trying.")
                    await ada.write("go-on", "")
                    assert "".join((await runs.done(within=LONG)).outputs) == "begun\n42\n"
        for cell, printed in ((starts, "started\n"), (waits, "granted\n"), (asks, "asked\n")):
            assert (await cell.done(within=LONG)).outputs == [printed]
        assert await leases(installed) == 4
    await returned(installed)


async def test_a_server_with_a_slice_has_it_for_all_its_notebooks(
    installed: Installation, visit: Visit
) -> None:
    student = await visit("alan")
    await student.start_server("vision/Lab place")
    server = installed.cluster.get("pod", "-n", NAMESPACE, "jupyter-alan")
    (container,) = server["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpumem"] == "655"
    async with student.notebook("Python 3 (ipykernel)") as notebook:
        assert "jupyter-alan" in await notebook.prints("import socket; print(socket.gethostname())")


async def test_prometheus_reads_with_the_token_that_the_page_describes(
    installed: Installation, visit: Visit
) -> None:
    admin = await visit("hopper")
    await admin.get("/hub/token")
    about = {"note": "Prometheus", "scopes": ["access:services!service=gpu-pool"]}
    made = await admin.call("POST", "/hub/api/users/hopper/tokens", about)
    assert made.code == 201, made.body.decode()
    token = json.loads(made.body)["token"]
    where = f"{installed.url}/services/gpu-pool/metrics"
    headers = {"Authorization": f"Bearer {token}"}
    answer = await AsyncHTTPClient().fetch(where, headers=headers, request_timeout=120)
    assert "gpu_pool_" in answer.body.decode()


def test_images_of_courses_are_fetched_before_anybody_comes(installed: Installation) -> None:
    image = "localhost/of-a-course:1"
    installed.cluster.ctr("images", "tag", name_of("notebook"), image)
    installed.fetch(image)
    installed.follow("Images before class")
    daemon = ("rollout", "status", "-n", NAMESPACE, "daemonset/continuous-image-puller", "--timeout=300s")
    installed.cluster.kubectl(*daemon)
    words = "kubectl -n jupyterhub get pods -l component=continuous-image-puller -o wide"
    assert NODE in installed.guide.type(installed.guide.says(words), installed.folder)
    puller = installed.cluster.get("daemonset", "-n", NAMESPACE, "continuous-image-puller")
    assert image in {each["image"] for each in puller["spec"]["template"]["spec"]["initContainers"]}


def test_the_store_is_copied_and_brought_back_as_the_page_says(installed: Installation) -> None:
    heading = "The store"
    text = installed.guide.file(heading, "restore.yaml")
    Path(installed.folder, "restore.yaml").write_text(text)
    typed = installed.guide.commands(heading)
    copied = next(number for number, each in enumerate(typed) if "> copy.db" in each) + 1
    for each in typed[:copied]:
        installed.guide.type(each, installed.folder)
    with gpu_drained(installed):
        assert device_of(installed)["drained"]
        for each in typed[copied:]:
            installed.guide.type(each, installed.folder)
        installed.wait()
        assert not device_of(installed)["drained"]
    assert "new, empty one was created" not in installed.cluster.kubectl(
        "logs", "-n", NAMESPACE, "deploy/gpu-pool"
    )


async def test_a_student_in_a_browser(installed: Installation, browser: Browser, visit: Visit) -> None:
    expect.set_options(timeout=LONG * 1_000)
    page = await browser.new_page()
    page.set_default_timeout(LONG * 1_000)
    await page.goto(f"{installed.url}/hub/spawn")
    await page.locator("#username_input").fill("grace")
    await page.locator("#password_input").fill(PASSWORD)
    await page.locator("#login_submit").click()
    await expect(page.get_by_text("Introduction to Machine Learning")).to_be_visible()
    await page.get_by_role("button", name="Start").click()
    await page.wait_for_url("**/lab**")
    await start_notebook(page, KERNEL)
    await run_cell(page, "print(6 * 7)")
    await expect(page.locator(".jp-OutputArea-output").first).to_contain_text("42")
    (pod,) = await asyncio.to_thread(installed.kernels)
    assert pod["metadata"]["labels"]["jupyter-gpu-pool/user"] == "grace"
    # Who goes home and forgets the notebook: with the server, its kernel ends.
    await (await visit("grace")).stop_server()
    await returned(installed)


@pytest.fixture
def own_namespace(installed: Installation) -> Iterator[str]:
    """Give courses namespaces, by the words of the page; this comes last, since it stays so."""
    heading, name = "Where each course has a namespace", "course-intro-ml"
    for file in ("values.yaml", "service/gpu_pool_config.py"):
        installed.add(heading, file)
    _let_other_namespaces_reach_the_service(installed.folder / "service/networkpolicy.yaml")
    installed.follow(heading)
    installed.cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    installed.cluster.kubectl("delete", "namespace", name, "--timeout=120s")


def _let_other_namespaces_reach_the_service(policies: Path) -> None:
    """Change what the page says of this file in words."""
    text, callers = policies.read_text(), "        - podSelector:\n            matchExpressions:\n"
    assert text.count(callers) == 1
    anywhere = callers.replace("- podSelector", "- namespaceSelector: {}\n          podSelector")
    policies.write_text(text.replace(callers, anywhere))


async def test_a_course_in_a_namespace_of_its_own(
    installed: Installation, own_namespace: str, visit: Visit
) -> None:
    student = await visit("ada")
    await student.start_server("intro-ml")
    async with student.notebook(KERNEL) as notebook:
        assert await notebook.prints("print(6 * 7)") == "42\n"
        (pod,) = await asyncio.to_thread(installed.kernels)
        assert pod["metadata"]["namespace"] == own_namespace
        (owner,) = pod["metadata"]["ownerReferences"]
        assert owner["name"] == "jupyter-ada"
    await returned(installed)


def test_it_is_taken_away_as_the_page_says(installed: Installation) -> None:
    installed.follow("Remove everything")
    kinds = "deployments,daemonsets,services,roles,clusterroles,clusterrolebindings"
    left = installed.cluster.get(kinds, "--all-namespaces")["items"]
    names = [each["metadata"]["name"] for each in left]
    assert [each for each in names if each.startswith(("gpu-pool", "hub"))] == []
    claims = installed.cluster.get("pvc", "-n", NAMESPACE)["items"]
    assert "claim-ada" in {each["metadata"]["name"] for each in claims}
