"""python -m paramd_service.control"""

import sys

from paramd_service.control.main import main

sys.exit(main(sys.argv[1:]))
