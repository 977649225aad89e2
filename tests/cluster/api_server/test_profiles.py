"""Profiles beside courses at a real JupyterHub: on its page in a browser, and by its API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright, expect

from support.browsers import chromium
from support.clusters import hami, node
from support.control_plane import Cluster
from support.jupyter_env import eventually
from support.kube_hub import KubeHub, running_kube_hub

__all__ = ["chromium"]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.long,
    pytest.mark.browser,
]

#: As one has them who had profiles before there were courses.
_CONFIG = """
import asyncio

async def as_slow_as_a_large_image(spawner, pod):
    if pod.metadata.labels.get("kind") == "either-image":
        await asyncio.sleep(3)
    return pod

c.KubeSpawner.modify_pod_hook = as_slow_as_a_large_image

async def profiles(spawner):
    return [
        {
            "display_name": "CPU only",
            "default": True,
            "kubespawner_override": {"cpu_limit": 0.5, "extra_labels": {"kind": "cpu-only"}},
        },
        {"display_name": "Research", "course": "research"},
        {
            "display_name": "Either image",
            "kubespawner_override": {"start_timeout": 1, "extra_labels": {"kind": "either-image"}},
            "profile_options": {"image": {"display_name": "Image", "choices": {
                "small": {"display_name": "Small"},
                "large": {"display_name": "Large", "kubespawner_override": {"start_timeout": 110}},
            }}},
        },
    ]

c.KubeSpawner.profile_list = profiles
c.GPUPoolKubeSpawner.courses_as_profiles = True
c.GPUPoolKubeSpawner.place_within = 20
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeHub]:
    """Run a Hub with profiles over a HAMi card of 32 GiB, and a node without GPUs."""
    card = hami("hami-1", gpus=1, count=50)
    card["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    await asyncio.to_thread(cluster.add, card, node("cpu-1", taints=[]))
    async with running_kube_hub(cluster, tmp_path_factory.mktemp("hub"), _CONFIG) as hub:
        yield hub


async def test_a_course_is_chosen_on_the_page_of_kubespawner(hub: KubeHub, chromium: str) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        expect.set_options(timeout=120_000)
        await page.goto(f"{hub.url}/hub/login")
        await page.get_by_label("Username").fill("ada")
        await page.get_by_label("Password").fill("any")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("radio", name="CPU only")).to_be_checked()
        titles = await page.locator("#kubespawner-profiles-list h3").all_inner_texts()
        # In no course that is not hers, and in none that is closed.
        assert titles == [
            "CPU only",
            "Either image",
            "Nothing kept",
            "Large software",
            "Too many cores",
            "Introduction",
            "Kernels in pods",
        ]
        await page.locator("[id='profile-option-course-intro--slice']").select_option("Large")
        await page.get_by_role("radio", name="Introduction").check()
        if folder := os.environ.get("GPU_POOL_SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/spawn-profiles.png")
        await page.get_by_role("button", name="Start").click()
        await page.wait_for_url("**/spawn-pending/**")
        await browser.close()
    await eventually(lambda: hub.is_ready("ada"))
    pod = await asyncio.to_thread(hub.pod_of, "ada")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpucores"] == "90"
    assert pod["metadata"]["labels"]["jupyter-gpu-pool/course"] == "intro"
    (server,) = json.loads((await hub.api("GET", "users/ada")).body)["servers"].values()
    # By the last of these the pool's service knows for which course the server is.
    assert server["user_options"] == {"profile": "course-intro", "slice": "Large", "course": "intro"}

    # What the card has left is less: the same profile is refused for the next, in words.
    await hub.api("POST", "users/grace")
    full = await hub.api("POST", "users/grace/server", {"profile": "course-intro", "slice": "Large"})
    assert "Not enough is free for 90% of a GPU now" in json.loads(full.body)["message"]


async def test_a_profile_without_a_course_goes_on_and_has_no_gpu(hub: KubeHub) -> None:
    await hub.api("POST", "users/alan")
    answer = await hub.api("POST", "users/alan/server", {})
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready("alan"))
    pod = await asyncio.to_thread(hub.pod_of, "alan")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "500m"}
    assert pod["metadata"]["labels"]["kind"] == "cpu-only"
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]


async def test_a_choice_decides_how_long_the_hub_waits_for_the_start(hub: KubeHub) -> None:
    await hub.api("POST", "users/barbara")
    # Slower than the second that the profile itself allows.
    answer = await hub.api("POST", "users/barbara/server", {"profile": "either-image", "image": "large"})
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready("barbara"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "research"}, "You are not in this course."),
        ({"course": "research"}, "You are not in this course."),
        ({"image--unlisted-choice": "example.org/any"}, "no option 'image--unlisted-choice'"),
        ({"profile": "course-later"}, "It opens on Mon 2101-01-03"),
        ({"profile": "course-intro", "slice": "100%"}, "Introduction offers 2% (Small), 90% (Large)"),
        ({"course": "intro", "kubespawner_override": {"privileged": True}}, "no option"),
        ({"profile": "nothing"}, "has no profile 'nothing'"),
        ({"profile": {}, "slice": 1}, "is not text"),
    ],
)
async def test_whoever_passes_the_page_by_meets_the_same_rules(
    hub: KubeHub, options: object, words: str
) -> None:
    await hub.api("POST", "users/karen")
    answer = await hub.api("POST", "users/karen/server", options)
    assert answer.code in (400, 403), answer.body
    assert words in json.loads(answer.body)["message"]
