"""What is typed into the editor of course files, and should not be."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse

from gpu_pool.courses import CourseFolder
from gpu_pool.courses.reading import MOST_BYTES
from support.course_editing import COURSE, EDIT, LARGER, field, folder, send, site, text_of
from support.dashboard import Site

__all__ = ["folder", "site"]

#: A text of YAML that would need some 10^9 items, were references read.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


class TestHostileTexts:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (BOMB, "references (* and &) are not supported"),
            ("[" * 5_000, "too many levels"),
            ("title: \x07", "has U+0007, which is not seen"),
            ("", "is empty"),
            ("!!python/object/apply:os.system ['true']", "is not supported"),
            ("title: x\n---\ntitle: y", "a second document"),
            (COURSE + "#" * 65_536, "is larger than 64 KiB"),
            ("</textarea><script>alert(1)</script>", "1 error in ml.yaml"),
        ],
        ids=["bomb", "deep", "bell", "empty", "tag", "two", "large", "script"],
    )
    @pytest.mark.parametrize("do", ["check", "save"])
    async def test_they_are_refused_in_words(
        self, site: Site, folder: Path, do: str, text: str, words: str
    ) -> None:
        answer = await send(site, text, do=do)
        assert answer.code == (200 if do == "check" else 422)
        page = answer.body.decode()
        assert words in unescape(page)
        assert page.count("<script") == 1
        assert field(page, "text") == text
        assert (folder / "ml.yaml").read_text() == COURSE

    @pytest.mark.parametrize("do", ["check", "save"])
    async def test_what_is_checked_is_what_is_written_line_ends_and_all(
        self, site: Site, folder: Path, do: str
    ) -> None:
        before = COURSE.replace("\n", "\r\n").encode()
        (folder / "ml.yaml").write_bytes(before)
        rest = MOST_BYTES - len(before)
        fits = COURSE + "#\n" * (rest // 3) + "#" * (rest % 3)
        for text, words in (
            (f"{fits}#", "is larger than 64 KiB, the limit for a course file, as it is saved: its lines end"),
            ("#\r\n" + COURSE, "has U+000D, which is not seen"),
        ):
            answer = await send(site, text, do=do)
            assert answer.code == (200 if do == "check" else 422)
            assert words in unescape(answer.body.decode())
            assert (folder / "ml.yaml").read_bytes() == before
        assert (await send(site, fits, do=do)).code == (200 if do == "check" else 303)
        saved = fits.replace("\n", "\r\n").encode() if do == "save" else before
        assert (folder / "ml.yaml").read_bytes() == saved
        found = CourseFolder(folder).current()
        assert ("ml" in found.usable, found.problems) == (True, ())

    async def test_what_is_not_utf_8_is_refused(self, site: Site, folder: Path) -> None:
        answer = await send_bytes(site, b"title: \xff\xfe")
        assert answer.code == 422
        assert "is not UTF-8" in text_of(answer)
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_a_form_as_browsers_send_it_is_read(self, site: Site, folder: Path) -> None:
        assert (await send_bytes(site, LARGER.replace("\n", "\r\n").encode())).code == 303
        assert (folder / "ml.yaml").read_text() == LARGER

    async def test_a_body_larger_than_any_form_is_not_taken(self, site: Site, folder: Path) -> None:
        answer = await send_bytes(site, b"#" * 1_000_000)
        assert answer.code in (400, 599)
        assert (folder / "ml.yaml").read_text() == COURSE

    @pytest.mark.parametrize(
        ("students", "stay"), [("0", "1h"), ("501", "1h"), ("x", "1h"), ("5", "soon"), ("٣", "1h")]
    )
    async def test_odd_figures_are_refused_in_words(self, site: Site, students: str, stay: str) -> None:
        answer = await send(site, LARGER, do="check", students=students, stay=stay)
        assert answer.code == 400
        assert "Accepted" in text_of(answer)
        assert field(answer.body.decode(), "text") == LARGER


async def send_bytes(site: Site, text: bytes) -> HTTPResponse:
    """Save bytes, in a form as browsers send it."""
    shown = await site.get(EDIT, "turing")
    page = shown.body.decode()
    token = re.findall(r'name="form-token" content="([^"]+)"', page)[0]
    cookie = next(each for each in shown.headers.get_list("Set-Cookie") if each.startswith("_xsrf="))
    fields = {"_xsrf": token.encode(), "seen": field(page, "seen").encode(), "do": b"save", "text": text}
    body = b"".join(
        b'--limit\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
        for name, value in fields.items()
    )
    headers = {
        "Cookie": f"user=turing; {cookie.partition(';')[0]}",
        "Content-Type": "multipart/form-data; boundary=limit",
    }
    request = HTTPRequest(
        site.url + EDIT, "POST", headers=headers, body=body + b"--limit--\r\n", follow_redirects=False
    )
    return await AsyncHTTPClient(force_instance=True).fetch(request, raise_error=False)
