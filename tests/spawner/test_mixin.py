"""The mixin over spawners that have forms, options and ways to start of their own."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.spawner import Spawner
from tornado.web import HTTPError
from traitlets import default
from traitlets.config import Config

from gpu_pool_spawner import GPUPoolSpawnerMixin


class Images(Spawner):
    """A spawner as there are many: it asks for an image, and is older than ``async``."""

    started = False

    @default("options_form")
    def _options_form_default(self) -> str:
        return "<select name='image'>"

    def options_from_form(self, form_data: Any) -> dict[str, Any]:
        return {"image": form_data["image"]}

    def start(self) -> tuple[str, int]:
        self.started = True
        return "127.0.0.1", 80

    async def stop(self, now: bool = False) -> None: ...

    async def poll(self) -> None: ...


class Mixed(GPUPoolSpawnerMixin, Images):
    pass


@pytest.fixture
def spawner(tmp_path: Path) -> Mixed:
    (tmp_path / "ml.yaml").write_text(
        "title: ML\nwho: {groups: [ml]}\nslices: [{name: Small, request: 2%}]\n"
    )
    config = Config(GPUPoolSpawnerMixin={"courses_dir": str(tmp_path), "pool_url": f"unix:{tmp_path}/none"})
    user = SimpleNamespace(name="ada", groups=[SimpleNamespace(name="ml")])
    return Mixed(config=config, user=user, user_options={})


async def test_the_course_is_asked_for_and_nothing_else(spawner: Mixed) -> None:
    assert 'value="ml"' in await spawner.get_options_form()
    assert spawner.run_options_from_form({"course": ["ml"]}) == {"course": "ml"}
    with pytest.raises(HTTPError, match="no option 'image'") as refused:
        spawner.run_options_from_form({"course": ["ml"], "image": ["mine"]})
    assert refused.value.headers == {}  # which JupyterHub 5.4.0 sends on


async def test_a_spawner_starts_as_it_always_did(spawner: Mixed) -> None:
    spawner.user_options = {"course": "ml"}
    assert await spawner.start() == ("127.0.0.1", 80)
    assert (
        "--ServerApp.kernel_spec_manager_class=gpu_pool_kernels.offered.OfferedKernels" in spawner.get_args()
    )


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [({}, 400, "No course was chosen"), ({"course": "other"}, 403, "No course file describes")],
)
async def test_what_is_refused_is_not_started(
    spawner: Mixed, options: dict[str, str], status: int, words: str
) -> None:
    spawner.user_options = options
    with pytest.raises(HTTPError) as refused:
        await spawner.start()
    assert refused.value.status_code == status
    assert words in refused.value.jupyterhub_message  # type: ignore[attr-defined]
    assert not spawner.started


async def test_a_file_that_has_become_bad_says_so(spawner: Mixed, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("title: 1\nslices: nothing\n")
    spawner.user_options = {"course": "bad"}
    with pytest.raises(HTTPError, match="Course bad cannot be used: its file has an error on line 2"):
        await spawner.start()


async def test_without_a_folder_there_are_no_courses(spawner: Mixed) -> None:
    spawner.courses_dir = ""
    assert (
        "You are in no course. Ask the person who runs this JupyterHub." in await spawner.get_options_form()
    )


def test_the_ready_classes_have_short_names() -> None:
    found = entry_points(group="jupyterhub.spawners")
    for name in ("gpu-pool", "gpu-pool-simple"):
        assert issubclass(found[name].load(), GPUPoolSpawnerMixin)
