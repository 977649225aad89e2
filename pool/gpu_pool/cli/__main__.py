"""``python -m gpu_pool.cli``: the command line, where no script is on the PATH."""

import sys

from gpu_pool.cli import main

sys.exit(main())
