"""`python -m paramd_service.control.audit`: checks a store, whether or not anybody uses it."""

from __future__ import annotations

import sys

from paramd_service.control.audit.offline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
