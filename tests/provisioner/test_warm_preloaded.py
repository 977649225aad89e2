"""What warm kernels have imported before they begin, and what they do not have in common all the same."""

from __future__ import annotations

import pytest

from support.frontend import frontend
from support.jupyter_env import Managers, answer
from support.warm_kernels import Spec, start, until_ready


@pytest.mark.long
async def test_what_is_preloaded_is_imported_and_not_in_the_namespace(spec: Spec, manager: Managers) -> None:
    name = spec("large", large="import os\nwho = os.getpid()\n")
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert await answer(km, "print('large' in globals())") == "False\n"
    assert await answer(km, "import large, os; print(large.who == os.getpid())") == "False\n"


@pytest.mark.long
async def test_random_numbers_and_secrets_differ(spec: Spec, manager: Managers) -> None:
    name = spec("drawing", drawing="import multiprocessing, random\nown = random.Random()\n")
    await until_ready(manager(name))
    code = (
        "import drawing, multiprocessing, random, tempfile, uuid\n"
        "print(random.random(), drawing.own.random(), uuid.uuid4(), tempfile.mktemp(),\n"
        "      multiprocessing.current_process().authkey.hex())"
    )
    await two_draw_different(name, manager, code)


@pytest.mark.long
async def test_random_numbers_of_numpy_differ(spec: Spec, manager: Managers) -> None:
    pytest.importorskip("numpy")
    name = spec("drawing", drawing="import numpy\nown = numpy.random.default_rng()\n")
    await until_ready(manager(name))
    code = "import drawing, numpy; print(numpy.random.rand(), drawing.own.random())"
    await two_draw_different(name, manager, code)


async def two_draw_different(name: str, manager: Managers, code: str) -> None:
    """Fail unless everything that ``code`` prints differs between two warm kernels."""
    drawn = []
    for _ in range(2):
        km = manager(name)
        assert await start(km)
        drawn.append((await answer(km, code)).split())
    assert drawn[0]
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.long
async def test_a_generator_with_a_seed_of_its_own_draws_what_it_draws_in_every_kernel(
    spec: Spec, manager: Managers
) -> None:
    # As in a module of a course, by which all students are to get the same numbers.
    source = "import random\nown = random.Random(7)\nnamed = random.Random()\nnamed.seed(a=7)\n"
    name = spec("drawing", drawing=source)
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    code = "import drawing, random; own = random.Random(7).random()\nprint("
    assert await answer(km, code + "drawing.own.random() == drawing.named.random() == own)") == "True\n"


@pytest.mark.long
async def test_a_generator_of_numpy_with_a_seed_of_its_own_does_so_too(spec: Spec, manager: Managers) -> None:
    pytest.importorskip("numpy")
    source = (
        "from numpy.random import RandomState, SeedSequence, default_rng\n"
        "def made(): return [RandomState(7), default_rng(7), default_rng([1, 2]),\n"
        "                    default_rng(SeedSequence(5).spawn(1)[0])]\n"
        "own = made()\n"
    )
    name = spec("drawing", drawing=source)
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    code = "import drawing\ndef drawn(them): return [each.normal() for each in them]\n"
    assert await answer(km, code + "print(drawn(drawing.own) == drawn(drawing.made()))") == "True\n"


#: What an administrator's or a student's site sets in every process.
SITE = """
import os
os.environ["SITE_SETS"] = "set"
os.environ["SITE_CHANGES"] = os.environ.get("SITE_CHANGES", "") + " and more"
os.environ.pop("SITE_REMOVES", None)
"""


async def test_what_the_site_does_to_the_environment_is_done_in_warm_kernels(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_CHANGES", "something")
    monkeypatch.setenv("SITE_REMOVES", "anything")
    name = spec(sitecustomize=SITE)
    cold, warm = manager(name), manager(name)
    await until_ready(cold)
    assert await start(warm)
    code = "import os; print({n: v for n, v in os.environ.items() if n.startswith('SITE_')})"
    expected = "{'SITE_CHANGES': 'something and more', 'SITE_SETS': 'set'}\n"
    assert await answer(cold, code) == expected
    assert await answer(warm, code) == expected


@pytest.mark.long
async def test_what_a_preloaded_module_logs_is_seen_in_the_notebook(
    spec: Spec, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In tests ipykernel does not show what is written to its standard error.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    # Its handler was made before the kernel had streams of its own.
    source = "import logging\nlog = logging.getLogger('own')\nlog.addHandler(logging.StreamHandler())\n"
    name = spec("logging_itself", logging_itself=source)
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    async with frontend(km) as page:
        # A thread of ipykernel's passes it on, also once the cell has ended.
        await page.run("import logging_itself; logging_itself.log.warning('careful')").shows("careful")


#: Child processes of every kind.
CHILDREN = """
import asyncio, concurrent.futures, multiprocessing, subprocess, sys, threading
def by(kind):
    with multiprocessing.get_context(kind).Pool(2) as pool:
        return pool.map(abs, [-1, -2])
async def tasks():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=subprocess.PIPE)
    return int((await process.communicate())[0]), await asyncio.to_thread(threading.active_count) > 1
with concurrent.futures.ProcessPoolExecutor(1) as executor:
    print(executor.submit(abs, -4).result())
print([by(kind) for kind in ("fork", "spawn", "forkserver")], await tasks())
print(threading.main_thread().native_id == threading.get_native_id())
"""


@pytest.mark.long
async def test_processes_threads_and_tasks_of_every_kind(spec: Spec, manager: Managers) -> None:
    name = spec("multiprocessing.pool")
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    assert (await answer(km, CHILDREN)).split("\n") == ["4", "[[1, 2], [1, 2], [1, 2]] (5, True)", "True", ""]
    # With the shell's own child watcher, and in a process that was forked by one that was forked.
    assert await answer(km, "!echo $((6 * 7))") == "42\r\n"
