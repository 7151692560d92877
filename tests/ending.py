"""How a worker process with process groups ends: before its interpreter finalizes.

With torch 2.13 and CPython 3.11 a gloo thread that is the last to let go of a tensor takes
the GIL; when the interpreter is finalizing already, the thread is ended inside a C++
destructor and the process aborts (returncode -6, "terminate called without an active
exception"). Collectives of torch's own, as of FSDP, are as exposed as any. So a worker runs
its exit steps and ends at once; what a training that simply ends meets is tested apart
(test_leaving.py).
"""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def end(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and ends the process with its status, as the interpreter would; no teardown.

    Exit steps run, threads that are not daemons are waited for, output is flushed.
    """
    status = 1
    try:
        status = _status_of(main)
        # What finalizing would call first; no public functions do only this.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(main: Callable[[], int | None]) -> int:
    try:
        result = main()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return int(leaving.code if leaving.code is not None else 0)
    except BaseException:
        # PyTorch's hook prefixes each line with the rank.
        sys.excepthook(*sys.exc_info())
        return 1
    return result if result is not None else 0
