"""`python -m paramd_service.sidecar`."""

import sys

from paramd_service.sidecar.main import main

sys.exit(main())
