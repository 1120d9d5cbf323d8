import sys

from hypermlp.cli import main

sys.exit(main())
