"""A machine with accounts of its own: this one, but for what an administrator changes of it.

Each command runs in a mount namespace in which the folders that an administrator writes to are a test's own.
So pages are followed as they stand, with the paths that they name, while nothing of this machine changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.hibernating import PYTHON, folder_of_root

ROOT: Final = Path(__file__).parents[2]
#: The folders that are a test's own, by their names below its folder. Of /etc it is a copy.
_OWN: Final = {
    "etc": "/etc",
    "home": "/home",
    "run": "/run",
    "srv": "/srv",
    "libexec": "/usr/local/libexec",
    "lib": "/var/lib",  # last: that folder is below it
}
#: The environment of all users, as pages have one in /opt/jupyter.
ENVIRONMENT: Final = "/srv/jupyter"
PATH: Final = f"{ENVIRONMENT}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SCRIPT: Final = f"""#!{ENVIRONMENT}/bin/python
import sys
from gpu_pool.cli import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Account:
    """A user of the machine."""

    name: str
    uid: int
    #: Their home, as this process finds it.
    home: Path


class Machine:
    """The machine; ``folder`` has what is its own."""

    def __init__(self, folder: Path) -> None:
        """Make it, without users."""
        self.folder = folder
        shutil.copytree("/etc", folder / "etc", symlinks=True)
        for name, where in _OWN.items():
            (folder / name).mkdir(exist_ok=True)
            Path(where).mkdir(exist_ok=True)
        for each in (folder / "etc" / "sudoers.d").iterdir():
            each.unlink()
        self.accounts: list[Account] = []
        # Users of no test have these numbers: what runs as one of them is this machine's.
        self._next_uid = 20_000 + os.getpid() % 4_000 * 10
        self._make_environment()

    @property
    def enter(self) -> list[str]:
        """The command that runs another on the machine, with all else as it is."""
        mounts = [f"mount --bind {self.folder / name} {where}" for name, where in _OWN.items()]
        return ["unshare", "--mount", "sh", "-c", f'{" && ".join(mounts)} && cd "$0" && exec "$@"']

    def command(self, *command: str, user: str = "root", **variables: str) -> list[str]:
        """Return the command that runs another there as a user, who has these variables alone."""
        home = "/root" if user == "root" else f"/home/{user}"
        known = {"PATH": PATH, "HOME": home, "USER": user, "LC_ALL": "C.UTF-8", **variables}
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        environment = (f"{name}={value}" for name, value in known.items())
        return [*self.enter, home, *become, "env", "-i", *environment, *command]

    def run(
        self, *command: str, user: str = "root", check: bool = True, given: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; with ``check``, fail with what it says if it fails. ``given`` is its input."""
        done = subprocess.run(
            self.command(*command, user=user, **variables),
            capture_output=True,
            text=True,
            check=False,
            input=given,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program of root's, which goes on; what it says is in the file ``log`` of the folder."""
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(self.command(*command, **variables), stdout=log, stderr=log)

    def type(self, command: str) -> str:
        """Type a line in root's shell; return what it prints."""
        return self.run("bash", "-c", command).stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of root's, by its path on the machine."""
        file = self.here(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def here(self, path: str) -> Path:
        """Return a path on the machine as this process finds it."""
        for name, where in _OWN.items():
            if path == where or path.startswith(f"{where}/"):
                return Path(f"{self.folder / name}{path.removeprefix(where)}")
        return Path(path)

    def add_user(self, name: str) -> Account:
        """Make a user with a home of theirs."""
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        self.run("useradd", "--create-home", "--user-group", f"--uid={uid}", "--shell=/bin/bash", name)
        self.accounts.append(Account(name, uid, self.here(f"/home/{name}")))
        return self.accounts[-1]

    def _make_environment(self) -> None:
        """Make the environment that all users have, with what that of the tests has."""
        self.run(PYTHON, "-m", "venv", "--without-pip", ENVIRONMENT)
        environment = self.here(ENVIRONMENT)
        (packages,) = environment.glob("lib/python*/site-packages")
        paths = [path for path in sys.path if path.endswith("-packages")]
        paths += [str(ROOT / each) for each in ("kernels", "pool", "pool_client", "provisioner", "spawner")]
        (packages / "tests.pth").write_text("\n".join(paths))
        for name in ("share/jupyter", "etc/jupyter"):
            shutil.copytree(Path(sys.prefix, name), environment / name, dirs_exist_ok=True)
        script = environment / "bin" / "gpu-pool"
        script.write_text(
            f"#!{ENVIRONMENT}/bin/python\nimport sys\nfrom gpu_pool.cli import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)


@contextmanager
def machine() -> Iterator[Machine]:
    """Have a machine for as long as a test needs it."""
    with folder_of_root() as folder:
        yield Machine(folder)
