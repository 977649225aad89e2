"""One look at Slurm's queue for all kernels of this process, and what has become of single jobs."""

from __future__ import annotations

import pwd
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.jobs import (
    SINFO_USED_FORMAT,
    SQUEUE_FORMAT,
    SQUEUE_NAMES_FORMAT,
    Job,
    read_free_types,
    read_job,
    read_jobs,
    read_names,
)
from gpu_pool_client import NotAllowed, PoolUnreachable
from gpu_pool_client._log import get_logger

#: Seconds between two looks at the queue, in seconds and in times of what one takes, and at most; and without
#: anybody who asks for it, until nobody looks any more.
_EVERY, _TIMES, _SELDOM, _IDLE = 3.0, 20.0, 60.0, 30.0
#: Seconds between two looks at which GPUs are free, while somebody waits.
_FREE_EVERY: Final = 15.0
#: And at which names the user's own jobs have: one that a killed server has left may wait as long.
_NAMES_EVERY: Final = 60.0


def last_of(job: str) -> Job | None:
    """Return how a job is that squeue does not show any more; None where Slurm has forgotten it."""
    try:
        return read_job(ask("scontrol", "--oneliner", "show", "job", job))
    except NotAllowed as error:
        if "Invalid job id" in error.message:
            return None
        raise PoolUnreachable(error.message, error.remedy) from error  # nothing is known of it


def cancelled_by(job: str) -> str:
    """Return who has cancelled a job, by Slurm's accounting; empty where it does not say."""
    found = None
    for pause in (0.0, 0.5, 1.0, 2.0):  # the accounting hears of it later than the controller
        time.sleep(pause)
        try:
            said = ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", job)
        except (NotAllowed, PoolUnreachable):
            return ""
        if found := re.search(r"CANCELLED by (\d+)", said):
            break
    if found is None:
        return ""
    try:
        return pwd.getpwuid(int(found[1])).pw_name
    except KeyError:
        return f"the user with the number {found[1]}"


class JobQueueWatch:
    """What squeue says of all jobs, asked by one thread: every few seconds, and slower where that is slow."""

    def __init__(self) -> None:
        self.jobs: Mapping[str, Job] = {}
        #: The ids of the user's own jobs by their names, as they were lately.
        self.own: Mapping[str, str] = {}
        self._own_at = float("-inf")
        #: Why it is not known how they are now; empty where it is.
        self.trouble = ""
        #: The types of which a GPU is free, as long as somebody asks for it.
        self.free_types: frozenset[str] = frozenset()
        self._free_asked_at = self._free_at = float("-inf")
        #: How often it was looked.
        self.looks = 0
        self._asked_at = float("-inf")
        self._partition = ""
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._is_running = False

    def keep(self) -> None:
        """Look from now on, for some time; it ends by itself once this is not called any more."""
        self._asked_at = time.monotonic()
        with self._lock:
            if self._is_running:
                return
            try:
                threading.Thread(target=self._run, name="gpu-pool-slurm-queue", daemon=True).start()
            except RuntimeError as error:  # there may be no thread more for now
                self._note_trouble(error)
            else:
                self._is_running = True

    def keep_free_types(self, partition: str) -> None:
        """Look at what is free as well, now and then and for some time."""
        self._partition, self._free_asked_at = partition, time.monotonic()

    def look_soon(self) -> None:
        """Look as soon as may be, since a job was submitted."""
        self.keep()
        self._woken.set()

    def look(self) -> None:
        """Look now; what is wrong with that is noted. Blocks."""
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - one look that fails must not be the last
            self._note_trouble(error)
        finally:
            self.looks += 1

    def _note_trouble(self, error: Exception) -> None:
        if not self.trouble:
            get_logger().warning("Slurm's queue is not known.", exc_info=error)
        self.trouble = f"Slurm's queue cannot be looked at: {type(error).__name__}: {error}."

    def _look(self) -> None:
        try:
            found = read_jobs(ask("squeue", "--noheader", "--all", f"--format={SQUEUE_FORMAT}"))
        except (PoolUnreachable, NotAllowed) as error:
            if not self.trouble:
                get_logger().warning("Slurm's queue is not known: %s", error)
            self.trouble = error.message
        else:
            self.jobs, self.trouble = found, ""
        now = time.monotonic()
        if now > self._own_at + _NAMES_EVERY and not self.trouble:
            self._own_at = now
            with suppress(PoolUnreachable, NotAllowed):
                printed = ask("squeue", "--noheader", "--all", "--me", f"--format={SQUEUE_NAMES_FORMAT}")
                self.own = read_names(printed)
        if now < self._free_asked_at + _IDLE and now > self._free_at + _FREE_EVERY and not self.trouble:
            self._free_at = now
            with suppress(PoolUnreachable, NotAllowed):
                printed = ask("sinfo", "--noheader", "--all", "--Node", f"--Format={SINFO_USED_FORMAT}")
                self.free_types = read_free_types(printed, self._partition)

    def _run(self) -> None:
        try:
            self._look_now_and_then()
        except BaseException:
            with self._lock:  # the next who asks has it begun again
                self._is_running = False
            raise

    def _look_now_and_then(self) -> None:
        while True:
            with self._lock:
                if time.monotonic() > self._asked_at + _IDLE:
                    self._is_running = False
                    return
            self._woken.clear()
            began = time.monotonic()
            self.look()
            took = time.monotonic() - began
            pause = min(max(_EVERY, _TIMES * took), _SELDOM)
            # Also for who has just submitted something: never more often than this.
            time.sleep(min(1.0, pause))
            self._woken.wait(pause)
