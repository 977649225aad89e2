"""What turns any spawner class into a spawner for courses.

The order in which the Hub calls a spawner. Only ``start`` is part of every spawn,
whether it comes from the form, from a link, by the REST API, from an administrator
or from the Hub itself::

    options_form       shows the spawn page
    options_from_form  what was filled in → user_options; the REST API sets these directly
    start              starts the server: here the choice is checked
    get_env, get_args  called by a spawner's own start
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from http import HTTPStatus
from typing import Any, Final

from tornado.web import HTTPError
from traitlets import Bool, Unicode, default
from traitlets.config import LoggingConfigurable

from gpu_pool.courses import CourseFile, Courses
from gpu_pool_client import BadRequest, GpuPoolError, SliceRequest
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._pool import COURSE_VARIABLE, URL_VARIABLE
from gpu_pool_spawner import choices
from gpu_pool_spawner.page import ServerChoice, SpawnPage, dashboard_of, spawn_page
from gpu_pool_spawner.pool_view import catalogue_of, view_of

#: What JupyterHub gives a server's token if nobody says otherwise.
_SERVERS_SCOPES: Final = ("users:activity!user", "access:servers!server")
#: Lets the pool's service read, with that token, for which course the server was started.
_TELLS_ITS_COURSE: Final = ("read:servers!server",)


class GPUPoolSpawnerMixin(LoggingConfigurable):
    """Gives every server that a spawner starts a course, and with it kernels on slices of GPUs.

    Name it before a class of JupyterHub's::

        class MySpawner(GPUPoolSpawnerMixin, DockerSpawner):
            pass
    """

    courses_dir = Unicode(
        help="The folder of course files, NAME.yaml: the same as c.PoolSettings.courses_dir of the pool."
    ).tag(config=True)
    pool_url = Unicode("unix:", help="The URL of the pool, which the servers get as GPU_POOL_URL.").tag(
        config=True
    )
    hub_pool_url = Unicode(
        help="""The URL at which the Hub asks the same pool what is free. Empty: pool_url. For example
        unix: if pool_url is the service's address behind the Hub and GPU_POOL_TOKEN is not set to a
        token for it."""
    ).tag(config=True)
    course_required = Bool(
        True,
        help="Whether every server must be for a course. If not, one may be started without a course, and "
        "without a GPU.",
    ).tag(config=True)
    cpu_kernels = Bool(
        True, help="Whether kernels without a GPU are shown, too, in the servers of courses."
    ).tag(config=True)
    contact = Unicode(
        "the person who runs this JupyterHub",
        help='Whom users who are in no course should ask. It completes a sentence that begins with "Ask".',
    ).tag(config=True)

    #: What the Hub knows of the server's user and of what was chosen; set by the Hub.
    user: Any
    user_options: Any
    #: Whether the kernels of its servers run elsewhere, where nothing can be preloaded.
    kernels_in_pods = False
    _course: tuple[str, CourseFile] | None = None

    @default("server_token_scopes")
    def _server_token_scopes_default(self) -> list[str]:
        return [*_SERVERS_SCOPES, *_TELLS_ITS_COURSE]

    @default("options_form")
    def _options_form_default(self) -> Any:
        return _course_form

    @default("apply_user_options")
    def _apply_user_options_default(self) -> Any:
        # Without one the Hub complains of options that nobody handles; start handles them.
        return _leave_to_start

    def options_from_form(self, form_data: Mapping[str, Sequence[object]]) -> dict[str, str]:
        """Return the ``user_options`` that a filled-in form means. Called by the Hub."""
        try:
            return choices.options_of_form(form_data)
        except BadRequest as error:
            raise refusal(error) from None

    def options_from_query(self, query_data: Mapping[str, Sequence[object]]) -> dict[str, str]:
        """Return the ``user_options`` that a link to the spawn page means. Called by the Hub."""
        try:
            return choices.options_of_link(query_data)
        except BadRequest as error:
            raise refusal(error) from None

    async def start(self) -> Any:
        """Start the server in its course, or refuse and say why. Called by the Hub in every spawn."""
        self._course = None
        await self._read_courses()
        try:
            self._course = self._checked_course()
        except GpuPoolError as error:
            raise refusal(error) from None
        address = super().start()  # type: ignore[misc]
        return await address if inspect.isawaitable(address) else address

    def get_env(self) -> dict[str, str]:
        """Return the server's environment; its course in it cannot be overridden. Called by ``start``."""
        name, course = self._course or (None, None)
        environment = super().get_env()  # type: ignore[misc]
        return with_course(environment, name, course, self.pool_url, in_pods=self.kernels_in_pods)

    def get_args(self) -> list[str]:
        """Return what follows the server's command. Called by ``start``."""
        return [*super().get_args(), *arguments(cpu_kernels=self.cpu_kernels)]  # type: ignore[misc]

    async def get_options_form(self) -> Any:
        """Return the form of the spawn page. Called by the Hub."""
        form = await super().get_options_form()  # type: ignore[misc]
        # What a configured function returns may be the default form, which is a function, too.
        form = form(self) if callable(form) else form
        return await form if inspect.isawaitable(form) else form

    async def course_form(self) -> str:
        """Return the spawn page's form: the courses that this user may use now."""
        return spawn_page(await self.page_facts())

    async def page_facts(self) -> SpawnPage:
        """Return what the spawn page shows. Called by the form."""
        await self._read_courses()
        now = datetime.now(timezone.utc)
        mine = choices.courses_of(self.user.name, self._groups(), self._courses(), now)
        offered = [(name, each) for name, course in mine.open.items() for each in course.requests]
        supply = await view_of(self.hub_pool_url or self.pool_url).supply(offered) if mine.open else None
        last = self.chosen_before()
        servers = await self.server_choices(mine.open)
        granted, notes = await self.granted_instead(mine.open), self.server_notes(mine.open)
        without = not self.course_required
        dashboard = dashboard_of(self.pool_url)
        return SpawnPage(mine, supply, now, without, last, self.contact, servers, granted, notes, dashboard)

    def chosen_course(self) -> str | None:
        """Return the name of the course in ``user_options``; None for none. Raises ``BadRequest``."""
        return choices.chosen(self.user_options)

    def needs_course(self) -> bool:
        """Whether the server that is to start must be for a course."""
        return self.course_required

    def chosen_before(self) -> object:
        """Return what the form's field had the last time, in whatever form it was."""
        return self.user_options.get(choices.COURSE)

    async def server_choices(self, courses: Mapping[str, CourseFile]) -> Mapping[str, Sequence[ServerChoice]]:
        """Return what is chosen of a server besides its course, by course: nothing, with most spawners."""
        del courses
        return {}

    async def granted_instead(self, courses: Mapping[str, CourseFile]) -> Mapping[SliceRequest, SliceRequest]:
        """Return what is granted instead of what courses offer, where that is not exactly to be had."""
        del courses
        return {}

    def server_notes(self, courses: Mapping[str, CourseFile]) -> Mapping[str, str]:
        """Return what to know of a course's servers before one is chosen, by course: nothing, mostly."""
        del courses
        return {}

    def _checked_course(self) -> tuple[str, CourseFile] | None:
        name = self.chosen_course()
        course = choices.check(
            name,
            self.user.name,
            self._groups(),
            self._courses(),
            datetime.now(timezone.utc),
            required=self.needs_course(),
        )
        return None if name is None or course is None else (name, course)

    def _groups(self) -> frozenset[str]:
        return frozenset(group.name for group in self.user.groups)

    async def _read_courses(self) -> None:
        """Read what is new in the course files, so that :meth:`_courses` need not."""
        if self.courses_dir:
            await catalogue_of(self.courses_dir).read()

    def _courses(self) -> Courses:
        if not self.courses_dir:
            EscapingLogger(self.log).error("No courses: c.%s.courses_dir is not set.", type(self).__name__)
            return Courses()
        return catalogue_of(self.courses_dir).courses()


def refusal(error: GpuPoolError) -> HTTPError:
    """Return what the Hub shows to whoever wanted a server, on the spawn page and as JSON alike."""
    status = HTTPStatus.BAD_REQUEST if isinstance(error, BadRequest) else HTTPStatus.FORBIDDEN
    refused = HTTPError(status, str(error))
    # What the Hub looks for in any exception of a spawn.
    refused.jupyterhub_message = str(error)  # type: ignore[attr-defined]
    refused.jupyterhub_html_message = f"<p>{escape(str(error))}</p>"  # type: ignore[attr-defined]
    # JupyterHub 5.4.0 looks for them, and answers 500 without a reason where there are none.
    refused.headers = {}  # type: ignore[attr-defined]
    return refused


async def _course_form(spawner: GPUPoolSpawnerMixin) -> str:
    return await spawner.course_form()


def _leave_to_start(spawner: object, user_options: object) -> None:
    """Do nothing."""


#: Lists, in JSON, the slices that a server offers kernels on; see gpu_pool_kernels.offered, which reads it.
KERNELS_VARIABLE: Final = "GPU_POOL_KERNELS"
#: Says, in JSON, what these kernels have imported when they start; it is read there, too.
PRELOAD_VARIABLE: Final = "GPU_POOL_PRELOAD"
#: The class, in the server's environment, that shows these kernels.
_MANAGER: Final = "gpu_pool_kernels.offered.OfferedKernels"


def with_course(
    environment: Mapping[str, str],
    name: str | None,
    course: CourseFile | None,
    url: str,
    *,
    in_pods: bool = False,
) -> dict[str, str]:
    """Return a server's environment with its course, and with nothing of any other course.

    ``in_pods`` is whether its kernels run elsewhere, so that the server has nothing to prepare for them.
    """
    slices = [] if course is None else [str(request) for request in course.requests]
    rest = {
        key: value for key, value in environment.items() if key not in (COURSE_VARIABLE, PRELOAD_VARIABLE)
    }
    mine = {COURSE_VARIABLE: name} if name else {}
    if course is not None and course.preload is not None:
        told: dict[str, object] = {"modules": course.preload}
        if course.preload_with_server and not in_pods:
            # Of one slice alone: a process for each would take a multiple of the memory.
            told["with_server"] = str(course.default_slice.request)
        mine[PRELOAD_VARIABLE] = json.dumps(told)
    return {**rest, **mine, URL_VARIABLE: url, KERNELS_VARIABLE: json.dumps(slices)}


def arguments(*, cpu_kernels: bool) -> list[str]:
    """Return what follows a server's command, so that its launcher shows the kernels of its course."""
    shown = [f"--ServerApp.kernel_spec_manager_class={_MANAGER}"]
    return shown if cpu_kernels else [*shown, "--OfferedKernels.other_kernels=False"]
