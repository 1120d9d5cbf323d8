"""Run the program as ``python -m hypermlp``."""

import sys

from hypermlp.cli import main

sys.exit(main())
