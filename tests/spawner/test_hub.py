"""A student's way through a real JupyterHub, and every way around its form."""

from __future__ import annotations

import json

import pytest

from gpu_pool_client import connect
from support.hub_with_proxy import Hub, Visitor, error_on
from support.jupyter_env import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
# One process, and so one Hub.
pytestmark += [pytest.mark.xdist_group("hub")]


async def test_the_page_shows_the_courses_of_a_user_that_are_open(hub: Hub, ada: Visitor) -> None:
    async def says_what_is_free() -> bool:
        # The page does not wait for a pool that takes its time.
        return "50 free now" in await ada.spawn_page()

    await eventually(says_what_is_free)
    page = await ada.spawn_page()
    assert page.count('type="radio" name="course"') == 2
    assert "Introduction" in page
    assert "Last year" not in page
    assert "simulated" in page


async def test_what_a_teacher_wrote_is_no_html(ada: Visitor) -> None:
    page = await ada.spawn_page()
    assert "&lt;script&gt;alert(&quot;theses&quot;)&lt;/script&gt; &amp; projects" in page
    assert "<script>alert(" not in page


async def test_who_has_no_open_course_reads_when_it_opens(alan: Visitor) -> None:
    page = await alan.spawn_page()
    assert "No course of yours is open now." in page
    assert "opens Mon 2101-01-03 at 10:00 (UTC)" in page
    assert "Last year</strong>: it is over." in page
    assert 'type="radio"' not in page


async def test_a_student_works_on_a_slice_of_the_course(
    hub: Hub, grace: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await grace.choose(course="intro")
    assert answer.code == 302, error_on(answer)
    await eventually(lambda: hub.is_ready("grace"))

    specs = json.loads((await hub.api("GET", "/user/grace/api/kernelspecs")).body)["kernelspecs"]
    ours = {name: each["spec"]["display_name"] for name, each in specs.items() if "gpu" in name}
    assert ours == {"python3-gpu-2pct": "Python 3 (GPU 2%)", "python3-gpu-50pct": "Python 3 (GPU 50%)"}
    assert "python3" in specs
    logo = await hub.api("GET", specs["python3-gpu-2pct"]["resources"]["logo-svg"])
    assert b"2%" in logo.body

    (token,) = json.loads((await hub.api("GET", "users/grace/tokens")).body)["api_tokens"]
    assert "read:servers!server=grace/" in token["scopes"]

    kernel = await hub.api("POST", "/user/grace/api/kernels", {"name": "python3-gpu-2pct"})
    assert kernel.code == 201, kernel.body
    for variable, value in hub.environment.items():
        monkeypatch.setenv(variable, value)
    async with connect(hub.pool) as pool:
        (lease,) = (await pool.status()).leases
        assert (lease.holder.course, lease.request.size) == ("intro", "2%")
    await hub.api("DELETE", "users/grace/server")


@pytest.mark.long
async def test_a_page_is_told_of_its_own_servers_slices_and_nobody_elses(
    hub: Hub, grace: Visitor, ada: Visitor
) -> None:
    await grace.choose(course="intro")
    await eventually(lambda: hub.is_ready("grace"))
    address = "/user/grace/gpu-pool/api/slices"
    await hub.api("POST", "/user/grace/api/kernels", {"name": "python3-gpu-2pct"})
    await grace.visit("/user/grace/view/none")
    told = json.loads((await grace.get(address)).body)["slices"]
    assert [(each["kernel_name"], each["size"]) for each in told] == [("python3-gpu-2pct", "2%")]
    # The login is that of her server: who is not its user sees nothing.
    assert (await ada.visit("/user/grace/view/none")).code == 403
    looked = await ada.get(address)
    assert looked.code == 403
    assert b"kernel_name" not in looked.body
    await hub.api("DELETE", "users/grace/server")


@pytest.mark.parametrize(
    ("user", "options", "words"),
    [
        # First: where nothing is chosen, some versions take what was chosen the last time.
        ("ada", {}, "No course was chosen. Choose one of yours: intro, thesis."),
        ("ada", None, "No course was chosen. Choose one of yours: intro, thesis."),
        ("edsger", {"course": "intro"}, "You are not in this course."),
        ("alan", {"course": "later"}, "It opens on Mon 2101-01-03 at 10:00 (UTC)."),
        ("alan", {"course": "over"}, "is over"),
        ("ada", {"course": "nothing"}, "No course file describes"),
        ("ada", {"course": ["intro"]}, "is not text"),
        ("ada", {"course": "intro", "environment": {"GPU_POOL_COURSE": "x"}}, "no option 'environment'"),
    ],
)
@pytest.mark.parametrize("server", ["server", "servers/second"])
async def test_whoever_passes_the_form_by_meets_the_same_rules(
    hub: Hub, user: str, options: object, words: str, server: str
) -> None:
    await hub.api("POST", f"users/{user}")
    # The way of all versions; since JupyterHub 6 they may stand in "user_options", too.
    answer = await hub.api("POST", f"users/{user}/{server}", options)
    assert answer.code in (400, 403)
    assert words in json.loads(answer.body)["message"]


async def test_a_refusal_is_told_on_the_page(hub: Hub, ada: Visitor, alan: Visitor) -> None:
    assert error_on(await ada.choose()) == "No course was chosen. Choose one of yours: intro, thesis."
    assert "no option 'image'" in error_on(await ada.choose(course="intro", image="mine"))
    answer = await alan.choose(course="later")
    assert answer.code == 403
    assert error_on(answer).startswith("Next century is not open now. It opens on Mon 2101-01-03")


async def test_the_address_of_a_refused_form_can_be_opened_again(ada: Visitor) -> None:
    page = await ada.get("/hub/spawn/ada?_xsrf=whatever")
    assert error_on(page) == "Nothing is chosen yet."
    assert page.body.count(b'type="radio"') == 2


async def test_an_administrator_starts_servers_by_the_rules_of_their_users(hub: Hub) -> None:
    admin = Visitor(hub.url, "admin")
    await admin.log_in()
    await hub.api("POST", "users/edsger")
    await admin.get("/hub/spawn/edsger")
    answer = await admin.post("/hub/spawn/edsger", {"course": "intro"})
    assert error_on(answer) == "You are not in this course. Ask its instructor to add you."
