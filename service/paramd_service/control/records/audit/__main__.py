"""`python -m paramd_service.control.records.audit`: verify a store, in use or not."""

from __future__ import annotations

import sys

from paramd_service.control.records.audit.offline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
