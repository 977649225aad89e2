"""A JupyterHub on this machine to try things out: two courses, four users, the pool's dashboard.

``make hub`` starts it. Its state is in ``.hub`` in the folder where it runs.

========  ====================================================================
hopper    the administrator, in the first course as well
turing    the instructor of both courses
ada       a student of the first course
grace     a student of both
========  ====================================================================

For everybody the password is ``gpu``. All servers run as the user who started
the Hub: this is not how a school runs one, see docs/administrator/jupyterhub.md.
"""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
STATE = Path(".hub").absolute()
PORT = int(os.environ.get("PORT", "8000"))
SERVICE_PORT = int(os.environ.get("SERVICE_PORT", "10101"))
COURSES = STATE / "courses"

STATE.mkdir(mode=0o700, exist_ok=True)
if not COURSES.exists():  # a copy, since instructors change it
    shutil.copytree(HERE / "courses", COURSES)
(STATE / "gpu_pool_config.py").write_text(
    f"c.PoolSettings.courses_dir = {str(COURSES)!r}\nc.PoolSettings.course_required = True\n"
)

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - JupyterHub gives it to this file

c.JupyterHub.bind_url = f"http://127.0.0.1:{PORT}"
c.JupyterHub.db_url = f"sqlite:///{STATE}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(STATE / "cookie_secret")
c.JupyterHub.hub_port = int(os.environ.get("HUB_PORT", "8081"))
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{os.environ.get('PROXY_PORT', '8001')}"
c.ConfigurableHTTPProxy.pid_file = str(STATE / "proxy.pid")

# Four users, who all have the same password.
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "gpu"  # noqa: S105 - told to everybody
c.Authenticator.allowed_users = {"turing", "ada", "grace"}
c.Authenticator.admin_users = {"hopper"}
c.JupyterHub.load_groups = {"intro": {"users": ["ada", "grace", "hopper"]}}

# Servers for courses. For demos only: all run as one user of this machine.
c.JupyterHub.spawner_class = "gpu-pool-simple"
c.Spawner.args = ["--allow-root"] if os.geteuid() == 0 else []
c.SimpleLocalProcessSpawner.home_dir_template = str(STATE / "home" / "{username}")
c.GPUPoolSpawnerMixin.courses_dir = str(COURSES)
c.GPUPoolSpawnerMixin.pool_url = f"http://127.0.0.1:{PORT}/services/gpu-pool"
c.GPUPoolSpawnerMixin.hub_pool_url = f"unix:{STATE}/pool.sock"

# The pool, which the Hub starts and ends.
c.JupyterHub.services = [
    {
        "name": "gpu-pool",
        "url": f"http://127.0.0.1:{SERVICE_PORT}",
        "command": [
            *(sys.executable, "-m", "gpu_pool.cli", "serve"),
            *(f"--socket={STATE}/pool.sock", f"--store={STATE}/store.db"),
        ],
        "environment": {
            "JUPYTER_CONFIG_DIR": str(STATE),
            **{name: os.environ[name] for name in ("GPU_POOL_DEVICES", "PATH") if name in os.environ},
        },
        "oauth_no_confirm": True,
        "display": True,
    }
]
c.JupyterHub.load_roles = [
    # Everybody may use the dashboard, and sees their own part of it.
    {"name": "user", "scopes": ["self", "access:services!service=gpu-pool"]},
]
