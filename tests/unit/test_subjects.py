"""No subject of the service knows another, nor either process' kernel one: not even its types.

`lint-imports` passes over imports for type checking alone; this reads all of them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import paramd_service
from paramd_service.parts import CONTROL, SIDECAR

SERVICE = Path(paramd_service.__file__).parent
SUBJECTS = {name.split(".")[1] for name in (*CONTROL, *SIDECAR)}


def imported(file: Path) -> Iterator[str]:
    """Rooms of the service that a file imports from."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, file
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "paramd_service":
                yield rest.partition(".")[0]


def strangers() -> Iterator[str]:
    for file in sorted(SERVICE.rglob("*.py")):
        room = file.relative_to(SERVICE).parts[0]
        for other in set(imported(file)) & SUBJECTS:
            if other != room:
                yield f"{file.relative_to(SERVICE)} imports {other}"


def test_no_subject_is_known_outside_its_folder() -> None:
    assert [(SERVICE / one).is_dir() for one in SUBJECTS] == [True] * len(SUBJECTS)
    assert list(strangers()) == []
