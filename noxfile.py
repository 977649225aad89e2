"""What is run with the oldest and the newest of everything that this project stands on: ``make matrix``.

Each cell is a nox session in an environment of its own. A cell whose Python is
not on ``PATH`` is skipped, and nox says so.
"""

from __future__ import annotations

import shutil

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.envdir = "build/matrix"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]
#: That of the cells in which other things than Python are old. Old releases know no newer one.
PYTHON_OF_OLD = "3.13"
#: Pythons of environments that have IPython's kernel and nothing of ours.
KERNEL_PYTHONS = ["3.6", "3.7", "3.8", "3.9", *PYTHONS]
#: The tests that other people's versions matter to.
TESTS = [
    *("tests/contract", "tests/kernels", "tests/provisioner", "tests/spawner"),
    *("tests/pool/store", "tests/pool/service/test_client.py", "tests/pool/service/test_hubbed.py"),
]

#: Those of JupyterLab's extension. Notebook 7.2 shows the panel and leaves the focus where it is, and is not
#: held to the rest of test_slice_in_notebook.py either.
LAB_TESTS = ["tests/browser/test_slice_in_lab.py", "tests/browser/test_slices_beside_others.py"]


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Run with everything at the lower bound that pyproject.toml declares."""
    session.install("--resolution=lowest-direct", "--editable", ".[test]")
    session.run("python", "tests/compatibility/bounds.py")
    _test(session)


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Run with the newest releases that this Python can have."""
    session.install("--upgrade", "--editable", ".[test]")
    _test(session)


@nox.session(python=PYTHON_OF_OLD)
def old_hub(session: nox.Session) -> None:
    """Run the Hub's parts with the oldest JupyterHub and KubeSpawner, and the newest of the rest."""
    session.install("--editable", ".[test]", "jupyterhub==5.4.*", "jupyterhub-kubespawner==7.0.*")
    _test(session, "tests/spawner", "tests/pool/service")


@nox.session(python=PYTHON_OF_OLD)
def old_lab(session: nox.Session) -> None:
    """Show slices in the oldest JupyterLab, in a real browser."""
    session.env["GPU_POOL_LABEXTENSION"] = "required"
    session.install("--editable", ".[test]", "jupyterlab==4.2.*", "notebook==7.2.*")
    session.env["GPU_POOL_REQUIRE_BROWSER"] = "1"
    session.run("pytest", "-n", "2", "-o", "filterwarnings=default", *LAB_TESTS, *session.posargs)


@nox.session(python=PYTHON_OF_OLD)
def kernels(session: nox.Session) -> None:
    """Start kernels that have nothing of this project, of every Python that is here, and of R."""
    session.install("--editable", ".[test]", "uv")
    here = [path for name in KERNEL_PYTHONS if (path := shutil.which(f"python{name}"))]
    session.env["GPU_POOL_KERNEL_PYTHONS"] = " ".join(here)
    session.run("pytest", "tests/compatibility", *session.posargs)


@nox.session(python=PYTHON_OF_OLD)
def wheel(session: nox.Session) -> None:
    """Install the wheel alone into an empty environment of every Python, and do what the README says."""
    session.install("--editable", ".[test]", "uv")
    session.env["GPU_POOL_TEST_PYTHONS"] = " ".join(f"python{name}" for name in PYTHONS)
    session.run("pytest", "-rs", "tests/packaging/test_wheel_alone.py", *session.posargs)


@nox.session(python=PYTHONS[0])
def recipe(session: nox.Session) -> None:
    """Build the recipe for conda-forge and run its tests, on what PyPI has in the place of conda-forge."""
    session.install("build", "packaging", "py-rattler-build>=0.60", "pyyaml")
    session.run("python", "recipe/build.py", env={"GPU_POOL_LABEXTENSION": "skip"})


def _test(session: nox.Session, *tests: str) -> None:
    # Old releases warn of what newer ones do, new ones of what is to come: neither is a failure here.
    options = ("-n", "4", "--dist", "loadgroup", "-o", "filterwarnings=default")
    chosen = ("-m", "not long and not browser and not gpu")
    session.run("pytest", *options, *chosen, *(tests or TESTS), *session.posargs)
