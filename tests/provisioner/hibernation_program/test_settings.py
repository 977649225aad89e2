"""The program's settings, and who may write them and what they name."""

from __future__ import annotations

import pytest

from support.hibernating import Installation, User, asleep, why_no_users

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]


def test_settings_that_others_can_write_are_refused(ada: User, installation: Installation) -> None:
    settings = installation.configure()
    settings.chmod(0o666)
    assert (
        ada.call("list")["error"]
        == f"{settings} is not root's alone: chown root {settings}; chmod go-w {settings}"
    )
    settings.chmod(0o644)
    assert ada.call("list")["ok"]


@pytest.mark.parametrize(
    "written",
    [
        '{"criu": 1}',
        '{"cpus": 1}',
        "[]",
        "{",
        '{"days": 0}',
        '{"folder": "asleep"}',
        '{"course_mib": {"physics": "1 GiB"}}',
        '{"course_mib": {"physics": -1}}',
    ],
)
def test_settings_that_are_wrong_are_refused(ada: User, installation: Installation, written: str) -> None:
    settings = installation.configure()
    settings.write_text(written)
    why = ada.call("list")["error"]
    installation.configure()
    assert str(settings) in why


def test_a_criu_that_others_can_write_is_refused(ada: User, installation: Installation) -> None:
    kernel, other = asleep(ada), ada.launch(["sleep", "600"])
    theirs = ada.home / "criu"
    theirs.write_text(f"#!/bin/sh\ntouch {ada.home}/called\n")
    theirs.chmod(0o755)
    installation.configure(criu=str(theirs))
    told = [ada.call("check")["why"]]
    told += [ada.call("dump", other.id)["error"], ada.restore(kernel).answer["error"]]
    installation.configure()
    assert all("is not root's alone" in why for why in told)
    assert not (ada.home / "called").exists()
