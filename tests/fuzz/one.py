"""One target under Atheris, for `__main__.py`: libFuzzer ends its process when it is done."""

import sys

import atheris


def main() -> None:
    """`python -m tests.fuzz.one TARGET [what libFuzzer takes]`."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["paramd", "paramd_service"]):
        from tests.fuzz.parsers import PARSERS

        target = PARSERS.get(name)
        if target is None:
            from tests.fuzz.servers import SERVERS

            target = SERVERS[name]
    target(b"")  # what is loaded when first needed is no hang, and no growth
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
