"""`python -m paramd.cli`, for when the `paramd` script is not on PATH."""

import sys

from paramd.cli.main import main

sys.exit(main())
