"""A program of a few lines that imports paramd: python -m tests.program CODE [ARGUMENTS].

What `python -c` would do, but it starts warm.
"""

import sys

if __name__ == "__main__":
    del sys.argv[0]
    exec(compile(sys.argv[0], "<program>", "exec"))  # noqa: S102
