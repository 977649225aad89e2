"""Threads of libraries: what they are is found out by a fork, whatever else was preloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.compiled import shared_library
from support.jupyter_env import Managers, answer
from support.warm_kernels import Spec, start, the_template, until_ready

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("soon")]

#: A thread that works for a library, and is asked by it for numbers.
WORKER = """
#include <pthread.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t thread;
static int runs, asked, answered, ends;
static void *work(void *nothing) {
    pthread_mutex_lock(&lock);
    while (!ends) {
        if (asked) { answered = asked * 2; asked = 0; pthread_cond_broadcast(&changed); }
        else pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return nothing;
}
int twice(int number) {
    pthread_mutex_lock(&lock);
    if (!runs) { ends = 0; runs = !pthread_create(&thread, 0, work, 0); }
    asked = number;
    pthread_cond_broadcast(&changed);
    while (asked) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return answered;
}
void end(void) {
    if (!runs) return;
    pthread_mutex_lock(&lock);
    ends = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(thread, 0);
    runs = 0;
}
int bears_forks(void) { return pthread_atfork(end, 0, 0); }
"""
#: The same by the compiler's OpenMP.
OPENMP = """
int twice(int number) {
    int sum = 0;
    #pragma omp parallel num_threads(2) reduction(+:sum)
    sum += number;
    return sum;
}
"""
MODULE = "import ctypes\nlibrary = ctypes.CDLL('{folder}/lib.so')\n"
USED = "library.twice(1)\n"


async def test_a_library_that_ends_its_threads_before_a_fork_is_warm(
    spec: Spec, manager: Managers, tmp_path: Path
) -> None:
    source = tmp_path / "worker.c"
    source.write_text(WORKER)
    module = MODULE.format(folder=shared_library(tmp_path, "lib.so", source, "-pthread"))
    name = spec("working", working=module + "library.bears_forks()\n" + USED)
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert await answer(km, "import working; print(working.library.twice(21))") == "42\n"


@pytest.mark.parametrize(("source", "option"), [(WORKER, "-pthread"), (OPENMP, "-fopenmp")])
async def test_a_library_whose_threads_a_fork_loses_is_not_forked_whatever_is_preloaded_beside_it(
    spec: Spec, manager: Managers, tmp_path: Path, source: str, option: str
) -> None:
    file = tmp_path / "source.c"
    file.write_text(source)
    module = MODULE.format(folder=shared_library(tmp_path, "lib.so", file, option)) + USED
    # Libraries of these names have threads that come back, and say nothing of others.
    name = spec("sklearn", "working", sklearn="", working=module)
    assert not await start(manager(name))
    template = await the_template()
    assert "started threads of their own" in template.refusal
    assert "working" in template.refusal
    assert not await start(manager(name))


async def test_openmp_that_was_not_used_is_warm(spec: Spec, manager: Managers, tmp_path: Path) -> None:
    file = tmp_path / "source.c"
    file.write_text(OPENMP)
    name = spec("idle", idle=MODULE.format(folder=shared_library(tmp_path, "lib.so", file, "-fopenmp")))
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert await answer(km, "import idle; print(idle.library.twice(21))") == "42\n"
