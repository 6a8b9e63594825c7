"""`python -m bench.serving CASE`: see `bench.serving.run`."""

import sys

from bench.serving.run import main

sys.exit(main())
