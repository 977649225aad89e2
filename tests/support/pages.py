"""Looks at HTML as a checker of accessibility does: what everybody needs who does not see the page."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())


class Document(HTMLParser):
    """What is in a page, and what is wrong with it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        #: Every element: its tag and its attributes.
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self._open: list[str] = []
        self._captioned: list[bool] = []
        self._text: list[str] = []
        self._named: list[int] = []
        self.feed(html)
        self.close()
        if self._open:
            self.problems.append(f"never closed: {self._open}")
        self._check()

    @property
    def text(self) -> str:
        return " ".join("".join(self._text).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "table":
            self._captioned.append(False)
        if tag == "caption":
            self._captioned[-1] = True
        if tag in ("a", "button", "summary"):
            self._named.append(len(self.text))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")
        if tag == "table" and not self._captioned.pop():
            self.problems.append("a table has no caption")
        if tag in ("a", "button", "summary") and self._named.pop() == len(self.text):
            self.problems.append(f"a {tag} has no name")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self._text.append(data)

    def _check(self) -> None:
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        self.problems += [f"id {each} is there twice" for each in set(ids) if ids.count(each) > 1]
        for attributes in (each for _, each in self.elements):
            for name in ("aria-labelledby", "aria-describedby", "for"):
                self.problems += [
                    f"no {each}" for each in (attributes.get(name) or "").split() if each not in ids
                ]
            if any(name.startswith("on") or name == "style" for name in attributes):
                self.problems.append(f"script or style within the page: {attributes}")
        labelled = {attributes.get("for") for attributes in self.all("label")}
        for field in (*self.all("input"), *self.all("textarea")):
            if field.get("type") != "hidden" and field.get("id") not in labelled:
                self.problems.append(f"a field has no label: {field}")
        for tag in ("h1", "main"):
            if len(self.all(tag)) != 1:
                self.problems.append(f"{len(self.all(tag))} {tag}")
        if not any(each.get("lang") for each in self.all("html")):
            self.problems.append("the page has no language")
        self.problems += ["a picture has no text" for each in self.all("img") if "alt" not in each]
        self.problems += [
            "a heading of a column has no scope" for each in self.all("th") if "scope" not in each
        ]
