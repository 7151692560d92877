"""The OpenAPI document as a file, from which the dashboard's types are made.

After a wanted change write both again:

    make web-types
"""

import json
from pathlib import Path

from paramd_service.control.api.app import build_app
from tests.control_services import services

FROZEN = Path(__file__).parents[2] / "client" / "web" / "openapi.json"
COMMAND = "make web-types"


def document() -> str:
    """The document of the code as it is now.

    Without the version, or every release would change it, and without problems, which are
    the same for every operation.
    """
    found = build_app(services()).openapi()
    found["info"]["version"] = ""
    for operations in found["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            operation["responses"] = {
                status: answer for status, answer in responses.items() if status.startswith("2")
            }
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    FROZEN.write_text(document())
