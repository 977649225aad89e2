"""A browser that looks at the dashboard of a fixture ``site``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, expect

from support.dashboard import Site

PHONE = {"width": 320, "height": 640}
#: How far the page is wider than the window.
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Every piece of text whose contrast to what is behind it is less than 4.5 (WCAG 2, level AA).
TOO_FAINT = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number)
      .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      if (at.matches("svg svg")) return getComputedStyle(at.querySelector("rect")).fill;
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim());
    if (!text || !element.getClientRects().length || element.closest("title, defs")) continue;
    const style = getComputedStyle(element);
    const pair = [light(element.matches("svg text") ? style.fill : style.color), light(behind(element))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.trim()}: ${ratio}`);
  }
  return found;
}"""

Open = Callable[..., Awaitable[Page]]


def is_complaint(page: Page, told: ConsoleMessage) -> bool:
    """Whether something is wrong with a page; that it is itself a refusal is not."""
    return told.type == "error" and told.location["url"] != page.url


@pytest.fixture
async def look(browser: Browser, site: Site) -> AsyncIterator[Open]:
    """Open a page as somebody; whatever the browser complains of fails the test."""
    complaints: list[str] = []

    async def look(path: str, user: str, **how: Any) -> Page:
        how = {
            "viewport": {"width": 1000, "height": 700},
            "locale": "en-GB",
            "timezone_id": "Europe/Berlin",
            **how,
        }
        context = await browser.new_context(**how)
        await context.add_cookies([{"name": "user", "value": user, "url": site.url}])
        page = await context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda told: complaints.append(told.text) if is_complaint(page, told) else None)
        await page.goto(site.url + path)
        return page

    yield look
    assert not complaints, complaints


async def live(page: Page) -> None:
    await expect(page.locator("#liveness")).to_have_text("Live.")


async def press_until(page: Page, element: str) -> None:
    """Go on with the tabulator key until the element has the focus."""
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.id") == element:
            return
    raise AssertionError(f"{element} cannot be reached by keyboard")
