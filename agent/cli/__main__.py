"""`python -m agent.cli` is `g35`, for where the console script is not on the path."""

import sys

from agent.cli.main import main

sys.exit(main())
