"""`python -m paramd.cli`, where the program `paramd` is not on the path."""

import sys

from paramd.cli.main import main

sys.exit(main())
