"""What this world's kernels preload: some memory, and the points at which their templates are struck."""

import os
from pathlib import Path

from chaos import points

points.arm_template(Path(os.environ[points.MARK], points.STRIKES))
#: Something to share, of 32 MiB.
KEPT = bytes(range(256)) * (1 << 17)
