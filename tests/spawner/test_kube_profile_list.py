"""Profiles of KubeSpawner beside courses: what a page lists, and what is started. No cluster, no Hub."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tornado.web import HTTPError

from gpu_pool_spawner.kube import GPUPoolKubeSpawner
from support.jupyter_env import eventually
from support.kube_profile_lists import (
    COURSES,
    IMAGES,
    OTHER,
    PROFILES,
    SERVER,
    TITLE,
    Reached,
    folder,
    made,
    refused,
    rendered,
    share,
    start,
)

__all__ = ["folder"]


async def test_courses_are_profiles_after_those_there_are(folder: Path) -> None:
    spawner = made(folder, PROFILES[:1], courses_as_profiles=True)
    listed = await rendered(spawner)
    assert [each["slug"] for each in listed] == ["cpu", "course-art", "course-ml"]
    assert [bool(each.get("default")) for each in listed] == [True, False, False]
    assert listed[1]["description"].startswith("Small: 2% of a GPU")
    choices = listed[2]["profile_options"]["slice"]["choices"]
    assert list(choices) == ["Small", "50%"]
    assert choices["Small"] == {"display_name": "Small: 2% of a GPU, 100 free now", "default": True}


async def test_what_a_teacher_wrote_is_text_in_both_templates(folder: Path) -> None:
    spawner = made(folder, courses_as_profiles=True)
    own = await spawner.get_options_form()
    assert f"<h3>{TITLE.replace('&', '&amp;')}</h3>" in own
    assert re.search('<option value="50%"[^>]*>A ”large” one: 50% of a GPU', own)
    assert "<b>" not in own
    assert (await rendered(spawner))[1]["display_name"] == TITLE


@pytest.mark.parametrize("changed", ["|truncate(9)", ".strip()", "|replace('ML', 'MI')", "[:20]", "|e", ""])
async def test_what_a_teacher_wrote_is_no_html_whatever_a_template_does(folder: Path, changed: str) -> None:
    spawner = made(folder, courses_as_profiles=True)
    spawner.profile_form_template = (
        f"{{% for p in profile_list %}}{{{{ p.display_name{changed} }}}}{{% endfor %}}"
    )
    assert not set("<>\"'") & set(await spawner.get_options_form())


async def test_a_form_that_is_computed_may_be_the_default_one(folder: Path) -> None:
    def form(spawner: Any) -> Any:
        spawner.profile_list = PROFILES[:2]
        return spawner._options_form_default()

    spawner = made(folder)
    spawner.options_form = form
    assert "Machine learning</h3>" in await spawner.get_options_form()
    spawner.options_form = lambda _: "<p>Another</p>"
    assert await spawner.get_options_form() == "<p>Another</p>"


async def test_a_page_lists_profiles_of_courses_that_may_be_used_now(folder: Path) -> None:
    closed = {"display_name": "Later", "course": "later"}
    assert [each["slug"] for each in await rendered(made(folder, [*PROFILES, closed]))] == ["cpu", "ml"]


async def test_a_course_is_listed_once_and_as_soon_as_its_file_is_there(folder: Path) -> None:
    spawner = made(folder, PROFILES, courses_as_profiles=True)
    assert [each["slug"] for each in await rendered(spawner)] == ["cpu", "ml", "course-art"]
    (folder / "new.yaml").write_text(OTHER.format("New", "ml"))

    async def shown() -> bool:
        slugs = [each["slug"] for each in await rendered(spawner)]
        return slugs == ["cpu", "ml", "course-art", "course-new"]

    await eventually(shown)


@pytest.mark.parametrize("is_async", [False, True])
async def test_profiles_may_be_computed_for_each_user(folder: Path, is_async: bool) -> None:
    asked = []

    def profiles(spawner: Any) -> list[dict[str, Any]]:
        asked.append(spawner.user.name)
        return PROFILES[:2]

    async def later(spawner: Any) -> list[dict[str, Any]]:
        return profiles(spawner)

    spawner = made(folder, later if is_async else profiles, courses_as_profiles=True)
    assert [each["slug"] for each in await rendered(spawner)] == ["cpu", "ml", "course-art"]
    asked.clear()
    assert share(await start(spawner, {"profile": "ml"})) == "2"
    assert asked == [spawner.user.name], "computed once for a start"


@pytest.mark.skipif(
    "dict" not in GPUPoolKubeSpawner.class_traits()["profile_list"].info(),
    reason="this KubeSpawner takes lists and functions only",
)
async def _never(spawner: Any) -> None:
    del spawner
    await asyncio.Event().wait()


def _broken(spawner: Any) -> None:
    raise RuntimeError(f"no directory of {spawner.user.name}")


@pytest.mark.parametrize("profiles", [_never, _broken])
async def test_profiles_that_cannot_be_computed_are_refused_in_words(
    folder: Path, caplog: pytest.LogCaptureFixture, profiles: Any
) -> None:
    spawner = made(folder, profiles, start_timeout=1)
    assert "could not list its profiles" in await refused(spawner, {"profile": "cpu"})
    with pytest.raises(HTTPError, match="could not list its profiles"):
        await spawner.get_options_form()
    assert "profile_list gave no profiles for mock@name" in caplog.text


async def test_a_function_of_profiles_may_refuse_in_its_own_words(folder: Path) -> None:
    def closed(spawner: Any) -> None:
        del spawner
        raise HTTPError(403, "Closed on Sundays.")

    with pytest.raises(HTTPError, match="Closed on Sundays"):
        await made(folder, closed).get_options_form()


async def test_profiles_may_be_a_mapping(folder: Path) -> None:
    spawner = made(folder, {"b": PROFILES[1], "a": PROFILES[0]})
    assert [each["slug"] for each in await rendered(spawner)] == ["cpu", "ml"]


async def test_who_has_no_profile_reads_why(folder: Path) -> None:
    assert "There is no server for you here." in await made(folder, PROFILES[2:]).get_options_form()
    later = folder / "later"
    later.mkdir()
    (folder / "later.yaml").rename(later / "later.yaml")
    page = await made(later, courses_as_profiles=True).get_options_form()
    assert "Later</strong>: opens Mon 2101-01-03" in page
    listed = await rendered(made(later, courses_as_profiles=True, course_required=False))
    assert [each["slug"] for each in listed] == ["no-course"]


@pytest.mark.parametrize(
    ("options", "percentage", "course"),
    [
        ({"profile": "ml"}, "2", "ml"),
        ({"profile": "ml", "size": "much"}, "50", "ml"),
        ({"profile": "ml", "size": "much", "course": "ml", "slice": "50%"}, "50", "ml"),
        ({"profile": "ml", "slice": "2%"}, "2", "ml"),
        ({"course": "ml"}, "2", "ml"),
        ({"course": "ml", "slice": "2%"}, "2", "ml"),
        ({"profile": "course-art"}, None, "art"),
        ({"course": "art"}, None, "art"),
        ({"profile": "cpu"}, None, None),
        # What the Hub kept before the administrator changed the profile, or from plain KubeSpawner.
        ({"profile": "ml", "course": "art", "gone": "x", "other--": [None]}, "2", "ml"),
        ({"profile": "cpu", "course": "ml"}, None, None),
        ({"profile": "course-art", "environment": {"A": "b"}}, None, "art"),
        ({}, None, None),
    ],
)
async def test_what_is_started(
    folder: Path, options: dict[str, object], percentage: str | None, course: str | None
) -> None:
    spawner = made(folder, PROFILES, courses_as_profiles=True)
    container = await start(spawner, options)
    assert share(container) == percentage
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert told.get("GPU_POOL_COURSE") == course
    # From there the Hub tells the pool's service for which course a server is.
    assert spawner.user_options.get("course") == course
    assert spawner.orm_spawner.user_options.get("course", course) == course


async def test_the_same_is_started_again_from_what_the_hub_keeps(folder: Path) -> None:
    small = {"display_name": "Small", "course": "ml", "kubespawner_override": {"image": "small:1"}}
    large = {**small, "display_name": "Large", "default": True, "kubespawner_override": {"image": "large:1"}}
    spawner = made(folder, [small, large])
    for options in ({}, {"course": "ml"}):
        first = await start(spawner, options)
        assert (await start(spawner, spawner.orm_spawner.user_options))["image"] == first["image"]


@pytest.mark.parametrize(
    ("options", "percentage"),
    [
        ({"profile": "course-ml"}, "2"),
        ({"profile": "course-ml", "slice": 'A "large" one'}, "50"),
        ({"course": "ml", "slice": "2%"}, "2"),
    ],
)
async def test_a_course_as_a_profile_has_its_slices(
    folder: Path, options: dict[str, object], percentage: str
) -> None:
    assert share(await start(made(folder, courses_as_profiles=True), options)) == percentage


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "bio"}, "You are not in this course."),
        ({"profile": "course-later"}, "It opens on Mon 2101-01-03"),
        ({"course": "bio"}, "You are not in this course."),
        ({"profile": "cpu", "slice": "50%"}, "is for no slice, and you chose the slice '50%'"),
        ({"profile": "ml", "slice": "50%"}, "is for the slice 'Small', and you chose the slice '50%'"),
        ({"profile": "course-art", "course": "ml"}, "is for the course 'art'"),
        ({"profile": "course-ml"}, "has no profile 'course-ml'"),  # the administrator's is for it
        ({"profile": "course-gone"}, "has no profile 'course-gone'"),
        ({"profile": ["ml"]}, "is not text"),
        (
            {"profile": "ml", "size": "all"},
            "There is no choice 'all' of 'size'. Choose one of 'little', 'much'.",
        ),
        ({"profile": "ml", "size": {}}, "is not text"),
        ({"profile": "ml", "size--unlisted-choice": "100%"}, "only what is listed can be chosen"),
        ({"profile": "cpu", "image--unlisted-choice": "evil.org/x"}, "failed validation regex"),
        ({"image--unlisted-choice": "evil.org/x"}, "failed validation regex"),
        ({"environment": {"CUDA_DISABLE_CONTROL": "true"}}, "no option 'environment'"),
        ({"course": "ml", "a--b": "c"}, "no option 'a--b'"),
        ({"profile": "no-course"}, "No course was chosen."),
        ({"course": "gone"}, "No course file describes"),
    ],
)
async def test_what_is_not_offered_is_refused_whoever_asks(
    folder: Path, options: dict[str, object], words: str
) -> None:
    assert words in await refused(made(folder, PROFILES, courses_as_profiles=True), options)


async def test_what_is_typed_is_checked_where_the_profile_is_not_named(folder: Path) -> None:
    profile = {"display_name": "Any image", "course": "ml", "profile_options": {"image": IMAGES}}
    spawner = made(folder, [profile])
    for options in ({}, {"course": "ml"}, {"profile": "any-image"}):
        words = await refused(spawner, {**options, "image--unlisted-choice": "evil.org/x"})
        assert "failed validation regex" in words


async def test_a_course_without_a_profile_is_refused_where_courses_are_none(folder: Path) -> None:
    spawner = made(folder, PROFILES)
    assert "No profile of this JupyterHub is for 'art'" in await refused(spawner, {"course": "art"})
    assert "has no profile 'course-art'" in await refused(spawner, {"profile": "course-art"})


async def test_nothing_chosen_starts_no_course_that_is_a_profile_by_itself(folder: Path) -> None:
    spawner = made(folder, courses_as_profiles=True)
    assert "No course was chosen. Choose one of yours: art, ml." in await refused(spawner, {})
    assert "No course was chosen." in await refused(made(folder, PROFILES[2:]), {})
    assert "No course was chosen." in await refused(made(folder, lambda _: []), {})


async def test_what_a_course_file_says_holds_against_a_profile(folder: Path) -> None:
    container = await start(made(folder, PROFILES), {"profile": "ml"})
    assert container["resources"]["limits"]["cpu"] == "2.0"
    assert container["image"] == "example.org/ml:1"
    assert container["resources"]["limits"]["memory"] == str(2**30)


async def test_nothing_of_one_profile_is_left_in_the_next(folder: Path) -> None:
    spawner = made(folder, PROFILES, environment={"A": "1"}, image="example.org/any:1")
    await start(spawner, {"profile": "ml"})
    container = await start(spawner, {"profile": "cpu", "image--unlisted-choice": "example.org/mine:1"})
    assert (container["image"], container["resources"]["limits"]["cpu"]) == ("example.org/mine:1", "8.0")
    assert "memory" not in container["resources"]["limits"]
    assert not {"KIND", "GPU_POOL_COURSE"} & {each["name"] for each in container["env"]}
    assert spawner.manifest.metadata.labels["kind"] == "cpu"
    container = await start(spawner, {"profile": "ml", "size": "much"})
    assert "kind" not in spawner.manifest.metadata.labels
    assert container["image"] == "example.org/ml:1"
    assert (spawner.profile_list, spawner.environment) == (PROFILES, {"A": "1", "KIND": "ml"})


async def test_what_the_hubs_hooks_set_before_a_start_is_kept(folder: Path) -> None:
    """As ``auth_state_hook`` and group overrides do, which come before the profile is applied."""
    own = {"kubespawner_override": {"environment": {"K": "1"}, "mem_limit": "1G"}}
    spawner = made(folder, [{"display_name": "A", **own}, {"display_name": "B"}])
    for name, token, limit in (("a", "one", 2**30), ("b", "two", 2**31), ("a", "three", 2**30)):
        spawner.user_options = {"profile": name}
        spawner.clear_state()
        spawner.environment = {**spawner.environment, "TOKEN": token}
        spawner.mem_limit = "2G"
        await spawner._run_apply_user_options(spawner.user_options)
        with pytest.raises(Reached):
            await spawner.start()
        (container,) = spawner.manifest.spec.containers
        assert [each.value for each in container.env if each.name == "TOKEN"] == [token]
        assert container.resources.limits["memory"] == str(limit)


async def test_a_course_decides_how_long_a_start_may_take_before_the_hub_asks(folder: Path) -> None:
    spawner = made(folder, PROFILES, start_timeout=60)
    spawner.user_options = {"profile": "ml"}
    await spawner._run_apply_user_options(spawner.user_options)
    starting = spawner.start()
    assert spawner.start_timeout == 600
    starting.close()


async def test_a_profile_or_a_choice_in_it_decides_how_long_a_start_may_take_where_no_course_does(
    folder: Path,
) -> None:
    own = {"kubespawner_override": {"start_timeout": 1200}}
    image = {
        "display_name": "Image",
        "choices": {
            "slim": {"display_name": "Slim"},
            "large": {"display_name": "Large", "kubespawner_override": {"start_timeout": 900}},
        },
        "unlisted_choice": {
            "enabled": True,
            "kubespawner_override": {"image": "{value}", "start_timeout": 1500},
        },
    }
    profiles = [
        {"display_name": "A", **own},
        {"display_name": "B"},
        {**PROFILES[1], **own},
        {"display_name": "C", **own, "profile_options": {"image": image}},
    ]
    spawner = made(folder, profiles, start_timeout=60)
    for options, within in (
        ({"profile": "a"}, 1200),
        ({"profile": "b"}, 60),
        ({"profile": "ml"}, 600),
        ({"profile": "c"}, 1200),
        ({"profile": "c", "image": "large"}, 900),
        ({"profile": "c", "image--unlisted-choice": "example.org/my:1"}, 1500),
    ):
        spawner.user_options = options
        spawner.clear_state()
        await spawner._run_apply_user_options(spawner.user_options)
        starting = spawner.start()
        assert spawner.start_timeout == within
        starting.close()


async def test_profiles_that_leave_no_way_to_a_course_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await rendered(made(folder, PROFILES[:1], courses_as_profiles=True))
    await rendered(made(folder, PROFILES))
    # A pool that is slow to answer is only warned about.
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []
    for _ in range(2):
        await rendered(made(folder, PROFILES[:1]))
    assert caplog.text.count("No server can be started in a course: profile_list is set") == 1


async def test_what_a_hook_changes_afterwards_is_what_is_started(folder: Path) -> None:
    spawner = made(folder, PROFILES)
    spawner.user_options = {"profile": "ml"}
    await spawner._run_apply_user_options(spawner.user_options)
    spawner.user_options = {"profile": "bio"}
    with pytest.raises(HTTPError, match="You are not in this course"):
        await spawner.start()


async def test_profiles_that_a_hook_sets_afterwards_are_those_that_are_started(folder: Path) -> None:
    spawner = made(folder, PROFILES)
    spawner.user_options = {"profile": "cpu"}
    await spawner._run_apply_user_options(spawner.user_options)
    new = {"display_name": "New", "slug": "cpu", "kubespawner_override": {"image": "new:1"}}
    spawner.profile_list = [new]
    with pytest.raises(Reached):
        await spawner.start()
    assert spawner.manifest.spec.containers[0].image == "new:1"


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"kubespawner_override": {"course": "ml"}}, '"course" is no setting of KubeSpawner'),
        ({"course": "gone"}, "No course file describes the course 'gone'"),
        ({"course": "ml", "slice": "Huge"}, "Huge"),
        ({"course": "art", "slice": "Small"}, "each of its kernels gets one"),
        ({"slice": "Small"}, "it names a slice, and no course"),
        ({"course": "ml", "profile_options": {"slice": IMAGES}}, "an option cannot be called 'slice'"),
        ({"profile_options": {"x": {"choices": {"a": {"course": "ml"}}}}}, "a choice names a course"),
        ({"course": ["ml"]}, "are names, in quotation marks"),
    ],
)
async def test_a_profile_that_is_set_up_wrongly_is_neither_listed_nor_started(
    folder: Path, caplog: pytest.LogCaptureFixture, profile: dict[str, Any], words: str
) -> None:
    for each_course in (False, False, True):
        spawner = made(
            folder, [PROFILES[0], {"display_name": "Wrong", **profile}], courses_as_profiles=each_course
        )
        named = {profile.get("course")} if isinstance(profile.get("course"), str) else set()
        free = [f"course-{name}" for name in ("art", "ml") if name not in named]
        assert [each["slug"] for each in await rendered(spawner)] == ["cpu", *(free if each_course else ())]
    errors = [each.message for each in caplog.records if each.levelname == "ERROR"]
    said, *more = [each for each in errors if not each.startswith("No server can be started in a course")]
    kept_from = "is not offered as a profile of its own, since 'wrong' names it."
    assert [kept_from in each for each in more] == [True for name in named if name in COURSES]
    assert said.startswith("The profile 'wrong' is not offered: ")
    assert words in said
    assert "is not set up as it should be" in await refused(spawner, {"profile": "wrong"})


async def test_what_was_chosen_the_last_time_may_be_anything(folder: Path) -> None:
    spawner = made(folder, PROFILES)
    spawner.user_options = {"profile": "cpu", "image--unlisted-choice": 5}
    assert [each["slug"] for each in await rendered(spawner)] == ["cpu", "ml"]
    assert spawner.user_options == {"profile": "cpu", "image--unlisted-choice": 5}


async def test_two_profiles_cannot_have_one_slug(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = {"display_name": "Another", "slug": "course-art"}
    spawner = made(folder, [taken, {**PROFILES[0], "slug": "course-art"}], courses_as_profiles=True)
    assert [each["display_name"] for each in await rendered(spawner)] == ["Another", TITLE]
    assert "another one has the same slug" in caplog.text
    assert "The course 'art' is not offered as a profile: profile_list has one with the slug" in caplog.text
    await start(spawner, {"profile": "course-art"})
    assert spawner.user_options.get("course") is None


async def test_a_form_of_kubespawner_means_a_profile_and_its_choices(folder: Path) -> None:
    spawner = made(folder, PROFILES, courses_as_profiles=True)
    # As jupyterhub-fancy-profiles sends it: the fields of all profiles, and one of its own.
    form = {
        "profile": ["ml"],
        "select-profile": ["ml"],
        "profile-option-ml--size": ["much"],
        "profile-option-cpu--image": ["slim"],
    }
    assert spawner.options_from_form(form) == {"profile": "ml", "size": "much"}
    assert spawner.options_from_query({**form, "_xsrf": ["x"]}) == {"profile": "ml", "size": "much"}
    assert spawner.options_from_query({"course": ["ml"], "slice": ["2%"]}) == {"course": "ml", "slice": "2%"}
    with pytest.raises(HTTPError, match=re.escape("Nothing is chosen yet.")):
        spawner.options_from_query({"_xsrf": ["x"]})


async def test_fields_of_a_profile_with_a_similar_slug_are_none_of_this_one(folder: Path) -> None:
    (folder / "ml--two.yaml").write_text(SERVER)
    spawner = made(folder, courses_as_profiles=True)
    form = {"profile": ["course-ml"], "profile-option-course-ml--two--slice": ["Small"]}
    assert share(await start(spawner, spawner.options_from_form(form))) == "2"
