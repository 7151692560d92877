"""Exit of the program: an error's text, its exit code, a traceback with --debug."""

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from paramd import extras, gone
from paramd.errors import ParamdError, codes_of
from paramd.places import known_jobs

INTERRUPTED = 130
BROKEN_PIPE = 141


def run(app: Callable[[], object], *, debug: bool, given: Sequence[str] = ()) -> int:
    """Run a program, `given` these arguments, and return its exit code.

    Codes: 0 ok, 1 general, 2 usage, 3 unreachable, 4 not found, 5 conflict, 6 partial,
    7 denied, 8 timeout; 130 interrupted, 141 broken pipe on stdout.
    """
    stdout = sys.stdout
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())
    # Ctrl-C may come between making a coroutine and passing it on.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    try:
        result = app()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        return _unread(stdout)
    except SystemExit as end:
        # click exits by itself on a broken pipe, and after a shell completion.
        if isinstance(end.__context__, BrokenPipeError):
            return _unread(stdout)
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debug:
            print(plain(traceback.format_exc().rstrip()), file=sys.stderr)
        text, code = explain(_gone(error, given) or error, given)
        if text:
            say(text)
        return code


def _gone(error: Exception, given: Sequence[str]) -> Exception | None:
    """Instead of click's usage error, the advice for a name of an earlier release."""
    context, said = getattr(error, "ctx", None), getattr(error, "message", "")
    return gone.command_line(context.command_path.split()[1:], given, said) if context else None


def _unread(stdout: TextIO) -> int:
    """Point stdout at /dev/null, or Python reports the broken pipe again in its flush at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stdout.fileno())
    os.close(devnull)
    return BROKEN_PIPE


def explain(error: Exception, given: Sequence[str] = ()) -> tuple[str, int]:
    """Return a text and an exit code for any exception. The text has one line, unless a ParamdError
    has several; `say` indents those."""
    if isinstance(error, ParamdError):
        return "\n".join(map(one_line, str(error).split("\n"))), codes_of(error).exit
    message = getattr(error, "format_message", None)
    if message is not None:
        # A usage error from click.
        return _usage(error, one_line(message()), given), getattr(error, "exit_code", 2)
    if isinstance(error, ModuleNotFoundError):
        said = extras.advice("this command", error)
        if said is not None:
            return said, 1
    if isinstance(error, OSError):
        return one_line(str(error)), 1
    if (kind := type(error).__name__) == "Abort":  # click's: "n" at a question, or Ctrl-C
        return "aborted; nothing was changed", 1
    return one_line(f"{kind}: {error}; this is a bug in paramd, --debug shows the traceback"), 1


_MEANT = {
    "ls": "paramd jobs", "list": "paramd jobs", "ps": "paramd jobs", "show": "paramd status",
    "get": "paramd summon NAME -f FILE", "cat": "paramd summon NAME -f FILE",
    "checkpoint": "paramd export DEST/KEY", "save": "paramd export DEST/KEY",
    "hold": "paramd pause", "stop": "paramd pause (paramd never ends a training)",
    "kill": "paramd cleanup JOB, which frees the memory of a dead training",
    "read": "paramd summon NAME -f FILE", "tail": "paramd logs", "top": "paramd status -w",
    "ckpt": "paramd export DEST/KEY", "unpause": "paramd resume", "continue": "paramd resume",
    "snapshot": "paramd mark NAME, or paramd export DEST/KEY", "rm": "paramd unmark NAME",
    "version": "paramd --version", "-V": "paramd --version",
    "set": "paramd edit NAME --fill X for parameters, paramd set-hyperparameters GROUP lr=X",
    "lr": "paramd set-hyperparameters, which lists them; GROUP lr=X sets one",
    "hyper": "paramd set-hyperparameters", "hparams": "paramd set-hyperparameters",
    "hyperparameters": "paramd set-hyperparameters",
    "config": "paramd context list (the settings of a training are in paramd.toml)",
    "login": "paramd context list, or --url URL --token @FILE",
    "completion": "paramd --install-completion", "--json": "-o json",
    "-j": "--job NAME", "-v": "--debug",
}  # fmt: skip
"""First guesses of users, in this and other programs, and the command here."""

_OPERATIONS = {
    "--scale": "--mul", "--multiply": "--mul", "--times": "--mul", "--set": "--fill",
    "--value": "--fill", "--plus": "--add",
}  # fmt: skip
"""First guesses of an operation of `paramd edit`, whose number is kept."""

_COUNTS = ("-n", "--limit", "--count", "--head")


def _meant(word: str, given: Sequence[str]) -> str:
    """What to write in place of an unknown command or option; "" if nobody knows."""
    commands = [one for one in given if not one.startswith("-")]
    if word == "help":
        return " ".join(["paramd", *commands[1:2], "--help"])
    if word in _OPERATIONS:
        return f"{_OPERATIONS[word]} {_value_of(word, given)}"
    if word in _COUNTS and commands:
        once = commands[0] == "status"
        return "paramd status, which prints once" if once else f"paramd {commands[0]} | head"
    return _MEANT.get(word, "")


def _value_of(option: str, given: Sequence[str]) -> str:
    """The value that was given to an option; "X" if there is none."""
    for at, one in enumerate(given):
        name, equals, value = one.partition("=")
        if name == option:
            return value if equals else "".join(given[at + 1 : at + 2]) or "X"
    return "X"


def _usage(error: Exception, message: str, given: Sequence[str]) -> str:
    # Without arguments click has printed the help already.
    if not message:
        return ""
    # In place of what click suggests, which is what is spelt alike.
    found = re.match(r"(No such (?:command|option):?) '?([\w-]+)", message)
    if found and (meant := _meant(found[2], given)):
        return f"{found[1]} {found[2]}; use: {meant}"
    job = re.match(r"Got unexpected extra argument\S* \(([\w.-]+)\)", message)
    if job and job[1] in known_jobs():
        return f"{message}; write --job {job[1]}"
    message = message.replace("Value error, ", "")
    command = " ".join(["paramd", *(word for word in given[:1] if not word.startswith("-"))])
    path = getattr(getattr(error, "ctx", None), "command_path", command)
    return f"{message} (see: {path} --help)"


def one_line(text: str) -> str:
    """`text` on one line, without control characters that could drive a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def plain(text: str) -> str:
    """`text` line by line, each without control characters, and all but the first set in.

    What ranks, hosts, files and stores say may hold sequences that drive a terminal, and lines that
    look like a program's own.
    """
    return "\n        ".join(map(one_line, text.split("\n")))


class _Plain(logging.Formatter):
    """Makes log lines `plain`: warnings repeat what ranks, hosts and files say, too."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def say(text: str) -> None:
    """Print a message to stderr, apart from the data on stdout, made `plain`."""
    print(f"paramd: {plain(text)}", file=sys.stderr, flush=True)
