"""The spawner for Kubernetes: a course server with or without a slice, and research servers with whole GPUs.

KubeSpawner's own profiles are used where there are any, and courses beside them, see
``kube_profile_list``. By themselves they would be checked when a server starts and not
before, merge what one choice sets into the next, and let everybody in where the list is
empty. What stays KubeSpawner's is all the rest of the pod, as ``c.KubeSpawner`` says it.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, Final

from tornado.web import HTTPError
from traitlets import TraitError, default

try:
    from kubernetes_asyncio.client.exceptions import ApiException
    from kubespawner import KubeSpawner
    from kubespawner.clients import shared_client
except ImportError as error:  # what JupyterHub shows if c.JupyterHub.spawner_class names this class
    raise ImportError(
        f"The spawner for Kubernetes is not installed: {error}. "
        "Install it: pip install 'jupyter-gpu-pool[kubernetes]'."
    ) from error

from gpu_pool.cluster.dialects import DialectOptions
from gpu_pool.courses import CourseFile
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, SliceRequest
from gpu_pool_client._durations import format_duration
from gpu_pool_client._log import EscapingLogger, quoted
from gpu_pool_spawner import choices, kube_choices, kube_messages, kube_profile_list
from gpu_pool_spawner.kube_choices import granted_instead, say_next, server_choices
from gpu_pool_spawner.kube_cluster import ClusterSupply, capacity, cluster_reader_of
from gpu_pool_spawner.kube_profile_list import Choice, Listed
from gpu_pool_spawner.kube_profiles import (
    KubeSettings,
    Profile,
    configured_pod,
    faults,
    pod_of,
    profile_of,
    settings_of,
)
from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin, refusal, with_course
from gpu_pool_spawner.page import ServerChoice, nothing_to_choose, say_size, spawn_page
from gpu_pool_spawner.pool_view import log_once

#: Seconds between two looks at a pod that is starting.
_LOOK: Final = 0.5
#: What follows why a server was given up.
_LATER: Final = "Nothing was started. Try again later."
#: What a student reads where the configuration would lift a limit; the log has the reason.
_MISCONFIGURED: Final = (
    "The configuration of this JupyterHub would lift the limits of GPU slices.",
    "Tell its administrator: the log of JupyterHub has the reason.",
)


class GPUPoolKubeSpawner(KubeSettings, KubeSpawner):  # type: ignore[misc]
    """Starts every user's server as a pod, in a course."""

    #: KubeSpawner's.
    profile_list: Any
    kernels_in_pods = True
    #: Seconds before the Hub's own timeout, which says nothing, at which a start is given up with a reason.
    gives_up_before = 2.0
    #: What was chosen; None while that is not known.
    _choice: Choice | None = None
    #: The same, found out before ``start``, and of which ``user_options`` and ``profile_list``.
    _early: tuple[Choice, dict[str, object], object] | None = None
    _profile: Profile | None = None
    _supply: ClusterSupply | None = None
    #: The Hub's: whether the server is being stopped.
    _stop_pending: bool
    #: KubeSpawner's: whether the home's claim is there, so that none is made.
    _pvc_exists: bool
    #: What was configured of the settings that a course has set.
    _replaced: Mapping[str, Any] = {}

    @default("apply_user_options")
    def _apply_user_options_default(self) -> Any:
        return _choose_early

    def options_from_form(self, form_data: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        """Return the ``user_options`` that a filled-in form means. Called by the Hub."""
        try:
            if self._has_profiles:
                return self._options_of_profiles(form_data)
            return kube_choices.options_of_form(form_data)
        except BadRequest as error:
            raise refusal(error) from None

    def options_from_query(self, query_data: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        """Return the ``user_options`` that a link to the spawn page means. Called by the Hub."""
        try:
            found = self._options_of_profiles(query_data) if self._has_profiles else {}
            return found if kube_profile_list.PROFILE in found else kube_choices.options_of_link(query_data)
        except BadRequest as error:
            raise refusal(error) from None

    async def course_form(self) -> str:
        """Return the spawn page's form: KubeSpawner's where there are profiles, or else the courses."""
        page = await self.page_facts()
        if not self._has_profiles:
            return spawn_page(page)
        listed = await self._listed()
        found = kube_profile_list.offered(listed, self._courses(), page.mine.open)
        if self.courses_as_profiles:
            found += kube_profile_list.course_profiles(page, listed)
        return self._kubespawners_form(found) if found else nothing_to_choose(page)

    def chosen_course(self) -> str | None:
        """Return the name of the course that was chosen. Called by ``start``."""
        return self._choice.course if self._choice else None

    def needs_course(self) -> bool:
        """Whether a server must be for a course: one of an administrator's profiles need not be."""
        return super().needs_course() and not (self._choice and self._choice.profile)

    def chosen_before(self) -> object:
        """Return what the form's field had the last time. Called by the form."""
        name, slice_name = self.user_options.get(choices.COURSE), self.user_options.get(kube_choices.SLICE)
        return f"{name}/{slice_name}" if slice_name else name

    def clear_state(self) -> None:
        """Forget the last server. Called by the Hub before all hooks of a start, and after a stop."""
        # Where the home of a stopped server is, for delete_forever.
        kept = {"namespace": self.namespace} if self._stop_pending else {}
        # Undo what the last choice set, so that nothing of it is left in the next.
        for name, value in self._replaced.items():
            setattr(self, name, value)
        self._replaced = {}
        super().clear_state()
        self._replace(kept)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what the Hub has kept of the last server. Called by the Hub when it has started anew."""
        configured = self.namespace
        super().load_state(state)
        if self._has_namespaces and self.namespace != configured:
            self._replaced = {"namespace": configured, **self._replaced}

    # Not a coroutine itself: the Hub reads start_timeout as soon as it has called this.
    def start(self) -> Any:
        """Start the server in its course, or refuse and say why. Called by the Hub in every spawn."""
        self._profile = None
        early, self._early = self._early, None
        self._choice = None
        # A hook may have changed either since.
        if early and early[1] == self.user_options and early[2] is self.profile_list:
            self._choice = early[0]
        if not self._has_profiles:
            with suppress(BadRequest):  # refused below
                self._choice = self._chosen(None)
        if self._choice and self._choice.start_timeout is not None:
            self._replace({"start_timeout": self._choice.start_timeout})
        self._replace(self._settings_of_choice())
        return self._watched_start()

    async def load_user_options(self) -> None:
        """Decide what this server gets. Called by KubeSpawner's start."""
        try:
            await self._apply_profile()
            self._profile = await self._checked_profile()
        except GpuPoolError as error:
            raise refusal(error) from None

    async def get_pod_manifest(self) -> Any:
        """Return the pod with its slice. Called by KubeSpawner's start."""
        made = await super().get_pod_manifest()
        dialect = self._supply.dialect if self._supply else None
        api = self.api.api_client
        try:
            pod = pod_of(
                api.sanitize_for_serialization(made), self._profile, self.user.name, dialect, kueue=self.kueue
            )
        except NotAllowed as error:
            EscapingLogger(self.log).error(
                "No server can start with this configuration of the JupyterHub: %s", error
            )
            raise refusal(NotAllowed(*_MISCONFIGURED)) from None
        await self._make_claim_templates()
        return api.deserialize(SimpleNamespace(data=json.dumps(pod)), "V1Pod")

    def get_env(self) -> dict[str, str]:
        """Return the server's environment. One that has the slice itself offers no kernels of the pool."""
        environment = super().get_env()
        name, course = self._course or (None, None)
        if course is not None and course.kubernetes.kernels == "server":
            return with_course(environment, name, None, self.pool_url)
        return dict(environment)

    def get_args(self) -> list[str]:
        """Return what follows the server's command. Only a server with kernels of the pool shows these."""
        if self._course is not None and self._course[1].kubernetes.kernels == "server":
            return list(super(GPUPoolSpawnerMixin, self).get_args())
        return super().get_args()

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what happens to the pod, in its user's words. Called by the Hub while it starts."""
        last = ""
        async for each in super().progress():
            event = each.get("raw_event")
            words = (
                each["message"]
                if event is None
                else kube_messages.of_event(event["reason"], event["message"])
            )
            if words and words != last:
                last = words
                yield {key: value for key, value in each.items() if key != "raw_event"} | {"message": words}

    async def server_choices(self, courses: Mapping[str, CourseFile]) -> dict[str, list[ServerChoice]]:
        """Return, for each course whose servers have the slice, what can be chosen. Called by the form."""
        if all(each.kubernetes.kernels == "pods" for each in courses.values()):
            return {}
        supply = await self._read_supply()
        return server_choices(courses, supply, _now(), may_wait=not self.refuse_when_full)

    async def granted_instead(self, courses: Mapping[str, CourseFile]) -> dict[SliceRequest, SliceRequest]:
        """Return what is granted instead, of slices that the cluster rounds up. Called by the form."""
        return granted_instead(courses, await self._read_supply() if courses else None)

    def server_notes(self, courses: Mapping[str, CourseFile]) -> dict[str, str]:
        """Return, for each course without homes, that nothing is kept. Called by the form."""
        return {name: kube_messages.NO_HOME for name, each in courses.items() if each.kubernetes.home == 0}

    async def _watched_start(self) -> Any:
        """Start, and give up with a reason before the Hub gives up without one."""
        if self._choice is None:
            self._choice = await self._choose()
            self._replace(self._settings_of_choice())
        known = self._pvc_exists
        if self._has_namespaces:
            # KubeSpawner has seen the home of the last server, which may lie in another namespace.
            self._pvc_exists = False
        starting = asyncio.ensure_future(super().start())
        began = time.monotonic()
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=_LOOK)
                words = self._hopeless(time.monotonic() - began)
                if words and not starting.done():
                    raise refusal(NotAllowed(words, _LATER))
            return starting.result()
        except asyncio.TimeoutError:
            # Its own waits end up to a tenth sooner or later than configured, at random.
            EscapingLogger(self.log).exception("KubeSpawner gave up %s's server", quoted(self.user.name))
            raise refusal(NotAllowed(self._not_ready(), _LATER)) from None
        except ApiException as error:
            said = kube_messages.message_of(error.body)
            EscapingLogger(self.log).error(
                "The cluster refused %s's server: %s",
                quoted(self.user.name),
                kube_messages.of_violation(said, self.namespace) or error.body,
            )
            raise refusal(NotAllowed(*kube_messages.of_refusal(error.status or 0, said))) from error
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
            # The Hub keeps a home's name only where there is one: a refused start must not lose it.
            self._pvc_exists = self._pvc_exists or known

    def _hopeless(self, elapsed: float) -> str:
        """Say why this start will not end well; empty while it may."""
        pod = self._pod()
        placed = bool(pod and pod["spec"].get("nodeName"))
        if self.place_within and elapsed > self.place_within and pod and not placed:
            return kube_messages.of_pod(pod) or kube_messages.NOT_READY
        return self._not_ready() if elapsed > self.start_timeout - self.gives_up_before else ""

    def _not_ready(self) -> str:
        """Say what this server has waited for in vain."""
        pod = self._pod()
        if pod is None:
            return kube_messages.NO_ANSWER
        within = format_duration(self.start_timeout)
        waited = f"The server was not ready within {within}. Its software may be large."
        return kube_messages.of_pod(pod) or waited

    def _pod(self) -> Mapping[str, Any] | None:
        reflector = self.pod_reflector
        return reflector.pods.get(f"{self.namespace}/{self.pod_name}") if reflector else None

    async def _checked_profile(self) -> Profile | None:
        name, course = self._course or (None, None)
        self._supply = await self._read_supply()
        if name is None or course is None:
            return None
        request = kube_choices.request_of(course, self._choice.slice_name if self._choice else None)
        if request is None:
            return Profile(name, course)
        if self._supply is None:
            raise NotAllowed(
                "The cluster does not show its GPUs at the moment, so no server with a slice can start.",
                "Try again; if that does not help, ask the administrator.",
            )
        profile = profile_of(name, course, request, self._supply.dialect)
        if self.refuse_when_full and not capacity(profile, self._supply):
            # Nobody is refused for what ended a moment ago.
            self._supply = await self._read_supply(fresh=True) or self._supply
        if self.refuse_when_full and not capacity(profile, self._supply):
            raise NotAllowed(
                f"Not enough is free for {say_size(request)} now{say_next(profile, self._supply, _now())}.",
                "Nothing was started: try again later, or choose a smaller slice.",
            )
        return profile

    async def _read_supply(self, *, fresh: bool = False) -> ClusterSupply | None:
        """Return what the cluster has, and log what it cannot give of what servers are offered."""
        api = shared_client("CoreV1Api").api_client
        options = DialectOptions(**self.dialect_options)
        supply = await cluster_reader_of(api, self.dialect, options).supply(fresh=fresh)
        if supply is not None:
            for words in faults(self._courses(), configured_pod(self), supply.dialect):
                log_once(words)
        return supply

    async def _make_claim_templates(self) -> None:
        """Make what the pod's claims refer to; the same name is always the same content."""
        translation = self._profile.translation if self._profile else None
        for template in translation.pod.claim_templates if translation else ():
            make = shared_client("ResourceV1Api").create_namespaced_resource_claim_template
            try:
                await make(self.namespace, template)
            except ApiException as error:
                if error.status != 409:
                    raise

    @property
    def _has_profiles(self) -> bool:
        return self.courses_as_profiles or bool(self.profile_list)

    @property
    def _has_namespaces(self) -> bool:
        """Whether the server's namespace may be another one in each start: a profile may set it, too."""
        return bool(self.course_namespace) or self._has_profiles

    async def _listed(self) -> list[Listed]:
        """Return the administrator's profiles for this user, and log what is newly wrong with them.

        Raises a refusal where ``profile_list`` fails.
        """
        try:
            found = self._sorted_dict_values(self.profile_list)
            found = found(self) if callable(found) else found
            if inspect.isawaitable(found):
                # The Hub sets no limit to what comes before start. The other half is for the pod.
                found = await asyncio.wait_for(found, self.start_timeout / 2)
            listed: list[Listed] = self._get_initialized_profile_list(list(found or ()))
        except HTTPError:  # in the administrator's own words
            raise
        except Exception:
            log = EscapingLogger(self.log)
            log.exception("profile_list gave no profiles for %s", quoted(self.user.name))
            again = "Try again; if that does not help, tell its administrator: the log has the reason."
            raise refusal(NotAllowed("This JupyterHub could not list its profiles.", again)) from None
        for words in kube_profile_list.faults(listed, self._courses(), each_course=self.courses_as_profiles):
            log_once(words)
        return listed

    def _kubespawners_form(self, profiles: Sequence[Listed]) -> str:
        """Return KubeSpawner's form, which takes for text whatever was chosen the last time."""
        kept = self.user_options
        self.user_options = {name: each for name, each in kept.items() if isinstance(each, str)}
        try:
            return str(self._render_options_form(profiles))
        finally:
            self.user_options = kept

    def _options_of_profiles(self, given: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        """Return the ``user_options`` that fields of KubeSpawner's form and of ours mean."""
        fields = {name: values for name, values in given.items() if name not in choices.HUBS_OWN}
        ours = {name: fields.pop(name) for name in (*fields,) if name in (choices.COURSE, kube_choices.SLICE)}
        return {**self._options_from_form(fields), **(kube_choices.options_of_link(ours) if ours else {})}

    async def _choose(self) -> Choice:
        """Return what was chosen. Refuses what there is not."""
        try:
            return self._chosen(await self._listed() if self._has_profiles else None)
        except GpuPoolError as error:
            raise refusal(error) from None

    def _chosen(self, listed: Sequence[Listed] | None) -> Choice:
        """Return what was chosen: among these profiles, or without any. Raises what ``choose`` does."""
        if listed is None:
            return Choice(*kube_choices.chosen(self.user_options))
        courses = self._courses()
        usable = choices.courses_of(self.user.name, self._groups(), courses, _now()).open
        choice = kube_profile_list.choose(
            self.user_options, listed, courses, usable, each_course=self.courses_as_profiles
        )
        resolved = kube_profile_list.resolved(self.user_options, choice)
        if resolved != self.user_options:
            # Where the pool's service learns for which course a server is.
            self.user_options = self.orm_spawner.user_options = resolved
        return choice

    async def _apply_profile(self) -> None:
        """Let KubeSpawner set what the chosen profile sets; what a course file says holds all the same."""
        profile = self._choice.profile if self._choice else None
        if profile is None:
            return
        # KubeSpawner merges mappings into those that are there, which other spawners may share.
        self._replace(
            {name: copy.deepcopy(getattr(self, name, None)) for name in kube_profile_list.overridden(profile)}
        )
        configured, self.profile_list = self.profile_list, [profile]
        try:
            await super().load_user_options()
        except (ValueError, TraitError) as error:
            raise BadRequest(
                f"The profile {profile['slug']!a} cannot be used like that: {error}",
                "Choose something else, or ask the administrator.",
            ) from None
        finally:
            self.profile_list = configured
        self._replace(self._settings_of_choice())

    def _settings_of_choice(self) -> dict[str, Any]:
        """Return the settings of the chosen course; none where ``start`` will refuse it."""
        name = self.chosen_course()
        try:
            course = self._courses().course(name) if name else None
        except GpuPoolError:
            return {}
        configured = {key: getattr(self, key) for key in ("cpu_guarantee", "mem_guarantee")}
        if name is None or course is None:
            return {}
        place = {"namespace": self.course_namespace.format(course=name)} if self.course_namespace else {}
        return {**settings_of(course, configured), **place}

    def _replace(self, settings: Mapping[str, Any]) -> None:
        before = {name: getattr(self, name, None) for name in settings}
        self._replaced = {**before, **self._replaced}
        for name, value in settings.items():
            setattr(self, name, value)


async def _choose_early(spawner: GPUPoolKubeSpawner, user_options: object) -> None:
    """Find out what was chosen before the Hub reads ``start_timeout``, which it may set."""
    del user_options
    spawner._early = None
    if spawner._has_profiles:
        profile_list = spawner.profile_list
        listed = await spawner._listed()
        with suppress(GpuPoolError):  # refused in start, as where this is not called
            choice = spawner._chosen(listed)
            spawner._early = choice, dict(spawner.user_options), profile_list


def _now() -> datetime:
    return datetime.now(timezone.utc)
