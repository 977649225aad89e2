"""The administrator's settings, from real files in Jupyter's configuration directories."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from traitlets.config import Config

from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Quota
from gpu_pool.service.settings import ServeSettings
from gpu_pool.settings import load_settings
from gpu_pool_client import BadRequest, WhenIdle


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    return tmp_path


def test_without_files_the_defaults_hold(folder: Path) -> None:
    assert load_settings().rules == Rules()


def test_python_and_json_files_are_read(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("c.PoolSettings.max_share = 0.5")
    (folder / "gpu_pool_config.json").write_text('{"PoolSettings": {"context_mib": 300, "max_devices": 2}}')
    assert load_settings().rules == Rules(context_mib=300, max_milli=500, max_devices=2)


def test_a_lease_has_as_many_contexts_as_is_set(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("c.PoolSettings.lease_contexts = 1")
    assert load_settings().rules.lease_contexts == 1


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", "auto"),
        ("c.PoolSettings.checkpoint = True", "on"),
        ("c.PoolSettings.checkpoint = False", "off"),
        ("c.PoolSettings.checkpoint = 'off'", "off"),
        ("c.PoolSettings.checkpoint = 'auto'", "auto"),
    ],
)
def test_what_can_be_on_or_off_is_also_written_as_a_boolean(folder: Path, line: str, meant: str) -> None:
    (folder / "gpu_pool_config.py").write_text(line)
    assert load_settings().checkpoint == meant


@pytest.mark.parametrize("value", ["'yes'", "1", "None"])
def test_no_other_word_switches_anything(folder: Path, value: str) -> None:
    (folder / "gpu_pool_config.py").write_text(f"c.PoolSettings.checkpoint = {value}")
    with pytest.raises(BadRequest, match="checkpoint"):
        load_settings()


def test_compute_may_be_granted_more_than_once_over(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("c.PoolSettings.compute_overcommit = 2.5")
    assert load_settings().rules.device_milli == 2500


def test_times_are_durations_or_seconds(folder: Path) -> None:
    file = folder / "gpu_pool_config.py"
    lines = ("attach_within = '2min'", "look_every = '2s'", "end_after = 90", "drain_after = 60")
    file.write_text("".join(f"c.PoolSettings.{line}\n" for line in lines))
    read = load_settings()
    assert (read.attach_within, read.look_every, read.end_after) == (120, 2, 90)
    assert read.sharing.drain_after == 60
    file.write_text("c.PoolSettings.look_every = '2min'")
    with pytest.raises(BadRequest, match="look_every is '2min'; it must be .* from 0.1 to 60"):
        load_settings()
    service = ServeSettings(config=Config(ServeSettings={"ttl": "5min", "longest_stream": "1h"}))
    assert (service.ttl, service.longest_stream) == (300, 3600)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpu_pool_config.py", "c.PoolSettings.max_share = = 1", "gpu_pool_config.py cannot be read: Syntax"),
        ("gpu_pool_config.py", "1 / 0", "cannot be read: ZeroDivisionError"),
        ("gpu_pool_config.json", "{", "gpu_pool_config.json cannot be read"),
        ("gpu_pool_config.py", "c.PoolSettings.max_share = 2", "max_share"),
        ("gpu_pool_config.py", "c.PoolSettings.context_mib = 'lots'", "context_mib"),
    ],
)
def test_a_wrong_file_is_named(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(BadRequest, match=words):
        load_settings()


def test_courses_groups_and_quotas(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("""
c.PoolSettings.courses = {
    "ml101": {
        "weight": 2,
        "longest_lease": "2h",
        "idle_limit": "15min",
        "when_idle": "end",
        "quota": {"share": "4", "gpu_hours_per_week": 100},
        "per_user": {"slices": 1, "memory": "2GiB"},
    },
}
c.PoolSettings.groups = {"phd": {"users": ["ada"], "priority": 1}}
c.PoolSettings.term_began = "2026-09-01"
""")
    settings = load_settings()
    course = settings.sharing.course("ml101")
    assert (course.weight, course.longest_lease, course.idle_limit) == (2, 7200, 900)
    assert course.quota == Quota(milli=4000, gpu_hours_per_week=100)
    assert course.per_user == Quota(slices=1, memory_mib=2048)
    assert course.terms(None).when_idle is WhenIdle.END
    assert settings.sharing.priority("ada", None) == 1
    assert time.localtime(settings.term_start)[:5] == (2026, 9, 1, 0, 0)


def test_numbers_of_courses_may_be_those_of_python(folder: Path) -> None:
    (folder / "gpu_pool_config.py").write_text("""
c.PoolSettings.default_course = {
    "weight": 1 / 3, "priority": -1, "longest_lease": 7200, "quota": {"share": 4}
}
c.PoolSettings.per_user = {"slices": 10**9, "gpu_hours_per_week": 0.5}
""")
    sharing = load_settings().sharing
    course = sharing.course(None)
    assert (course.weight, course.priority, course.longest_lease) == (1 / 3, -1, 7200)
    assert course.quota == Quota(milli=4000)
    assert sharing.per_user == Quota(slices=10**9, gpu_hours_per_week=0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("courses = {'ml101': {'wieght': 2}}", "course 'ml101' has a setting 'wieght'. Known: weight, "),
        (
            "courses = {'ml101': {'weight': -1}}",
            "weight of course 'ml101': '-1' is not a valid number. Accepted: a number from 0",
        ),
        (
            "courses = {'ml101': {'weight': float('nan')}}",
            "weight of course 'ml101': 'nan' is not a valid number",
        ),
        (
            "courses = {'ml101': {'idle_limit': '5min', 'yield_after': 301}}",
            "yield_after of course 'ml101': 5min1s is longer than idle_limit .5min.",
        ),
        ("courses = {'ml101': 'all'}", "course 'ml101' is 'all'"),
        (
            "courses = {'ml101': {'longest_lease': 'soon'}}",
            "'soon' is not a duration.* 15min",
        ),
        (
            "courses = {'ml101': {'longest_lease': 0}}",
            "longest_lease of course 'ml101': '0' is not longer than zero. Leave it out for no limit",
        ),
        (
            "courses = {'ml101': {'when_idle': 'stop'}}",
            "when_idle of course 'ml101': 'stop' is not known. Accepted: keep, end",
        ),
        (
            "default_course = {'quota': {'share': '2GiB'}}",
            "share of quota of default_course: '2GiB' is not a share. Accepted: a share, such as 50%",
        ),
        (
            "default_course = {'quota': {'memory': '50%'}}",
            "memory of quota of default_course: '50%' is not an amount of memory. Accepted: an amount",
        ),
        ("default_course = {'quota': {'share': 'much'}}", "'much' is not a GPU slice"),
        (
            "per_user = {'slices': 1.5}",
            "slices of per_user: '1.5' is not a valid number. Accepted: a whole number from 0",
        ),
        ("per_user = {'slices': True}", "slices of per_user: is 'True'. Accepted: one value"),
        ("per_user = {'share': ['50%']}", "share of per_user: is a list. Accepted: one value"),
        (
            "courses = {'ml101': {'when_idle': 'kep'}}",
            "when_idle of course 'ml101': .* Did you mean keep?",
        ),
        (
            "groups = {'phd': {'users': 'ada'}}",
            "users of group 'phd': is 'ada'. Accepted: a list of user names",
        ),
        ("groups = {'phd': {'users': 1}}", "users of group 'phd': is 1. Accepted: a list of user names"),
        ("drain_after = 'never'", "'never' is not a duration"),
        ("term_began = 'autumn'", "Accepted: a date such as 2026-09-01"),
    ],
)
def test_a_wrong_course_is_named_with_what_is_accepted(folder: Path, text: str, words: str) -> None:
    (folder / "gpu_pool_config.py").write_text(f"c.PoolSettings.{text}")
    with pytest.raises(BadRequest, match=words):
        load_settings()
