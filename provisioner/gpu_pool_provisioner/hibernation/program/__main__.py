"""Runs the program: of the one file that is installed, or of this folder, from which root runs it."""

import sys

from gpu_pool_hibernation.command import main  # type: ignore[import-not-found]  # beside this file

sys.exit(main())
