"""The spawn page's form, as HTML. Pure.

The Hub's page has the ``<form>``, its button and Bootstrap 5; this is what lies
between. It needs no script. Every text in it that somebody wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Final
from urllib.parse import quote, urlsplit

from gpu_pool.courses import CourseFile
from gpu_pool.courses.access import open_now
from gpu_pool.courses.model import SliceOffer
from gpu_pool_client import SliceRequest, format_memory
from gpu_pool_client._free import accepting, free_now, say_drained
from gpu_pool_client._requests import format_length
from gpu_pool_spawner.choices import COURSE, OwnCourses
from gpu_pool_spawner.pool_view import PoolSupply

_FIELDSET: Final = """\
<fieldset class="mb-3" id="gpu-pool-courses">
<legend class="fs-5">{legend}</legend>
{inner}
</fieldset>
"""
_CHOICE: Final = """\
<div class="card mb-2"><div class="card-body"><div class="form-check mb-0">
<input class="form-check-input" type="radio" name="{field}" id="gpu-pool-course-{key}"
 aria-describedby="gpu-pool-about-{key}" value="{value}" required{state}>
<label class="form-check-label fw-bold" for="gpu-pool-course-{key}">{title}</label>
<div id="gpu-pool-about-{key}">{about}</div>
</div></div></div>
"""
_SLICE: Final = "<li>{what}{free}</li>\n"
_FREE: Final = '<span class="text-body-secondary">, {words}</span>'
_NOTE: Final = '<p class="alert alert-{kind}" role="status">{text}</p>\n'
#: The button belongs to the Hub's page; where there is nothing to start, it would only be refused.
_NO_BUTTON: Final = "<style>#spawn_form .feedback-container { display: none; }</style>\n"
_NO_ANSWER: Final = (
    "The pool does not answer at the moment, so this page does not show what is free. "
    "You can start a server all the same; in it, a kernel with a GPU may have to wait."
)
_DASHBOARD: Final = '<p class="form-text"><a href="{path}">{text}</a></p>\n'
_DASHBOARD_TEXT: Final = "See what the pool has, who waits, and what is yours"
_WITHOUT: Final = "A server without a GPU."


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """A server that may be chosen of a course whose servers are not all alike."""

    value: str
    title: str
    about: str
    #: Whether it can be started now.
    usable: bool = True


@dataclass(frozen=True, slots=True)
class SpawnPage:
    """What the spawn page shows."""

    mine: OwnCourses
    #: What the pool has; None if it did not answer.
    supply: PoolSupply | None
    #: Aware.
    now: datetime
    #: Whether a server may be started without a course.
    without: bool = False
    #: What was chosen the last time, in whatever form it was.
    last: object = None
    #: Whom to ask; completes a sentence that begins with "Ask".
    contact: str = ""
    #: By course: what is chosen besides, where its servers are not all alike.
    servers: Mapping[str, Sequence[ServerChoice]] = field(default_factory=dict)
    #: What is granted instead, of slices that the cluster rounds up.
    granted: Mapping[SliceRequest, SliceRequest] = field(default_factory=dict)
    #: By course: what to know of its servers before one is chosen.
    notes: Mapping[str, str] = field(default_factory=dict)
    #: The path of the pool's dashboard, if it has one behind the Hub.
    dashboard: str = ""


def dashboard_of(pool_url: str) -> str:
    """Return the path of a pool's dashboard, which is a service of the Hub; empty where there is none.

    The path alone: the servers may reach the pool at an address that browsers do not.
    """
    url = urlsplit(pool_url)
    return url.path.rstrip("/") + "/" if url.scheme in ("http", "https") and "/services/" in url.path else ""


def spawn_page(page: SpawnPage) -> str:
    """Return the form."""
    link = _DASHBOARD.format(path=escape(page.dashboard), text=_DASHBOARD_TEXT) if page.dashboard else ""
    return _choices(page) + link


def _choices(page: SpawnPage) -> str:
    if not page.mine.open and not page.without:
        return nothing_to_choose(page)
    notes = [] if page.mine.open else [_NOTE.format(kind="info", text=_none_open(page))]
    if page.supply is None and page.mine.open.keys() - page.servers.keys():
        notes.append(_NOTE.format(kind="warning", text=_NO_ANSWER))
    choices = [_course(name, course, page) for name, course in page.mine.open.items()]
    if page.without:
        choices.append(_choice("", "No course", _WITHOUT, checked=not page.mine.open))
    legend = "Choose a course" if page.mine.open else "Choose what to start"
    return _FIELDSET.format(legend=legend, inner="".join([*notes, *choices])) + _simulated(page)


def nothing_to_choose(page: SpawnPage) -> str:
    """Return the form of somebody who has nothing to choose, which says why."""
    # Somebody may be in a course of which there is no profile.
    text = f"There is no server for you here. {_ask(page.contact)}" if page.mine.open else _none_open(page)
    return _NOTE.format(kind="info", text=text) + _NO_BUTTON


def _course(name: str, course: CourseFile, page: SpawnPage) -> str:
    if name in page.servers:
        return "".join(_server(name, each, page) for each in page.servers[name])
    is_only = len(page.mine.open) == 1 and not page.without
    slices = "".join(_slice(name, offer, page) for offer in course.slices)
    when = say_until(course, page.now)
    said = f'<p class="text-body-secondary mb-1">{escape(when)}</p>\n' if when else ""
    about = f'{said}<ul class="list-unstyled mb-0">\n{slices}</ul>{_note(name, page)}'
    return _choice(name, course.title, about, checked=is_only or name == page.last)


def say_until(course: CourseFile, now: datetime) -> str:
    """Say until when a course is open; empty for one that does not close."""
    when = open_now(course, now)
    return "" if when == "open" else when


def _server(name: str, each: ServerChoice, page: SpawnPage) -> str:
    about = f'<p class="mb-0">{escape(each.about)}</p>{_note(name, page)}'
    return _choice(each.value, each.title, about, checked=each.value == page.last, usable=each.usable)


def _note(name: str, page: SpawnPage) -> str:
    return f'\n<p class="mb-0">{escape(page.notes[name])}</p>' if name in page.notes else ""


def _choice(value: str, title: str, about: str, *, checked: bool, usable: bool = True) -> str:
    return _CHOICE.format(
        field=COURSE,
        # aria-describedby is a list with spaces between; an id with one would be two that are not there.
        key=quote(value, safe=""),
        value=escape(value),
        title=escape(title),
        about=about,
        state=("" if usable else " disabled") + (" checked" if checked and usable else ""),
    )


def _slice(course: str, offer: SliceOffer, page: SpawnPage) -> str:
    """Return a slice of a course with what is free of it."""
    what, free = say_slice(course, offer, page)
    return _SLICE.format(what=escape(what), free=_FREE.format(words=escape(free)) if free else "")


def say_slice(course: str, offer: SliceOffer, page: SpawnPage) -> tuple[str, str]:
    """Say what a slice of a course is, and how many are free; the latter is empty where nothing is known."""
    request, supply = offer.request, page.supply
    granted = page.granted.get(request, request)
    free = "" if supply is None else _free(course, request, granted, supply)
    size = say_granted(request, granted)
    # An offer may be called by its size.
    return offer.name if offer.name.casefold() == size.casefold() else f"{offer.name}: {size}", free


def _free(course: str, request: SliceRequest, granted: SliceRequest, supply: PoolSupply) -> str:
    """Say how many are free, or what one meets who asks."""
    if refusal := supply.refusals.get((course, request)):
        # It speaks to somebody who has asked.
        return f"not available now: {refusal}"
    number, wait = free_now(granted, supply.devices), supply.waits.get((course, request), "")
    if number is None:
        return wait
    if number and not wait:
        return f"{number} free now"
    # What is free may be kept for those in the queue.
    words = ", ".join(filter(None, ("none free for you now" if number else "none free now", wait)))
    drained = [each for each in accepting(granted, supply.devices) if each.drained]
    return f"{words}. {say_drained(drained)}" if drained else words


def _none_open(page: SpawnPage) -> str:
    """Say why there is no course to choose, and when there is."""
    closed = page.mine.closed
    if not closed:
        return f"You are in no course. {_ask(page.contact)}"
    listed = "".join(
        f"<br>\n<strong>{escape(course.title)}</strong>: {escape(_when(course, page.now))}"
        for course in closed.values()
    )
    return f"No course of yours is open now.{listed}"


def _when(course: CourseFile, now: datetime) -> str:
    words = open_now(course, now)
    return "it is over." if words == "over" else f"{words}."


def _ask(contact: str) -> str:
    return f"Ask {escape(contact)}." if contact else ""


def _simulated(page: SpawnPage) -> str:
    if page.supply is None or not page.supply.simulated:
        return ""
    return '<p class="form-text">These GPUs are simulated: nothing can be computed on them.</p>\n'


def say_granted(request: SliceRequest, granted: SliceRequest) -> str:
    """Say what a slice is, and what there is instead where the cluster has no such slices."""
    return say_size(request) + ("" if granted == request else f" ({say_size(granted)} on this cluster)")


def say_size(request: SliceRequest) -> str:
    """Say what a slice is: ``2% of a GPU``, ``4 GiB of the memory of a GPU``, ``2 whole GPUs``."""
    filters = f" ({request.filters})" if str(request.filters) else ""
    if request.length is not None:
        filters += f" for {format_length(request.length)}"
    if request.whole_devices:
        return f"{'a whole GPU' if request.count == 1 else f'{request.count} whole GPUs'}{filters}"
    if request.memory_mib is None:
        amount = SliceRequest(milli=request.milli).size
    else:
        memory = format_memory(request.memory_mib)
        amount = f"{memory[:-3]} {memory[-3:]} of the memory"
    gpus = "a GPU" if request.count == 1 else f"each of {request.count} GPUs"
    limit = f", up to {request.limit} of its memory while that is free" if request.has_limit else ""
    return f"{amount} of {gpus}{limit}{filters}"
