"""Run in a container by ``probes``: says in one line of JSON what a container finds around it."""

import contextlib
import grp
import json
import os
import pathlib
import subprocess
import sys
import time

#: Said by images and shells, each in its own way.
_OF_IMAGES = (
    "PATH",
    "LANG",
    "PYTHON",
    "GPG_KEY",
    "LC_",
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "JUPYTER",
    "GPU_POOL_",
)
_STATUS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "SigBlk", "SigIgn")
#: Leaves a process without a parent, which ends soon.
_ORPHAN = ["sh", "-c", "sleep 0.1 & echo $!"]


#: Signals 32 and 33 are the C library's own: nobody can set how they are taken, and whoever starts a
#: container may have them ignored.
_RESERVED = 0b11 << 31


def status(pid="self"):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {**found, "SigIgn": f"{int(found['SigIgn'], 16) & ~_RESERVED:016x}"}


def names(folder):
    return sorted(each.name for each in pathlib.Path(folder).iterdir())


def tried(path):
    """Return what comes of making a file there."""
    file = pathlib.Path(path, "tried")
    try:
        file.write_text("")
        found = file.stat()
        file.unlink()
    except OSError as error:
        return type(error).__name__ + str(error.errno)
    return [found.st_uid, found.st_gid]


def listed(folder):
    """Return what lies in a folder, links and all; names that a kubelet makes of the time are left out."""
    found = {}
    for path in [pathlib.Path(folder), *sorted(pathlib.Path(folder).iterdir())]:
        about = path.lstat()
        name = "..time" if path.name.startswith("..2") else path.name
        found[name] = [oct(about.st_mode), about.st_uid, about.st_gid]
        if path.is_file():
            try:
                found[name].append(path.read_text())
            except OSError as error:
                found[name].append(type(error).__name__)
            found[name].append(oct(path.stat().st_mode))
    return found


def orphan_waited_for():
    """Whether a process that has lost its parent is gone once it has ended, rather than a zombie."""
    made = subprocess.run(_ORPHAN, capture_output=True, text=True)
    path = pathlib.Path("/proc", made.stdout.strip())
    while path.exists():
        with contextlib.suppress(OSError):
            if status(made.stdout.strip())["State"].startswith("Z"):
                # It is waited for soon, or never.
                time.sleep(1)
                return not path.exists()
        time.sleep(0.05)
    return True


def main():
    volumes = sys.argv[1:]
    own = status()
    shm = os.statvfs("/dev/shm")
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "gid": os.getgid(),
                "groups": sorted(os.getgroups()),
                "named": grp.getgrgid(100).gr_name,
                "cwd": str(pathlib.Path.cwd()),
                "umask": os.umask(0o22),
                "first": os.getpid() == 1,
                "waited": orphan_waited_for(),
                "processes": len([each for each in names("/proc") if each.isdecimal()]) > 3,
                "status": {key: own[key].strip() for key in _STATUS},
                "variables": {k: v for k, v in sorted(os.environ.items()) if not k.startswith(_OF_IMAGES)},
                "written": {
                    path: tried(path)
                    for path in (
                        "/",
                        "/etc",
                        "/home/jovyan",
                        "/tmp",
                        "/run",
                        "/dev/shm",
                        "/proc/sys/kernel",
                        "/sys",
                        *volumes,
                    )
                },
                "volumes": {path: listed(path) for path in volumes},
                "devices": names("/dev"),
                "shm": shm.f_blocks * shm.f_frsize,
            }
        ),
        flush=True,
    )


main()
