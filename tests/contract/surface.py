"""The public surface as text: exported names, exit codes, commands, protos.

REST is frozen as a document of its own (openapi_document.py).

The text is checked in as surface.txt, so that a change of what others rely on shows in
review. After a wanted change write it again:

    make surface
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    FileDescriptor,
    ServiceDescriptor,
)

import paramd
from paramd.cli.main import app
from paramd.errors import CODES
from paramd.v1 import common_pb2, control_pb2, layout_pb2, sidecar_pb2

FROZEN = Path(__file__).with_name("surface.txt")
MODULES = (common_pb2, control_pb2, layout_pb2, sidecar_pb2)
COMMAND = "make surface"

_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def surface() -> str:
    """The surface of the code as it is now, one fact a line."""
    lines = [f"# Written by `{COMMAND}`; see surface.py."]
    lines += [f"paramd.{name}" for name in sorted(paramd.__all__)]
    lines += _error_lines()
    lines += _command_lines(typer.main.get_command(app), "paramd")
    for module in MODULES:
        lines += _file_lines(module.DESCRIPTOR)
    return "\n".join(lines) + "\n"


def _error_lines() -> Iterator[str]:
    for kind, codes in sorted(CODES.items(), key=lambda item: item[0].__name__):
        retry = " retry" if codes.retry else ""
        yield f"error {kind.__name__} exit={codes.exit} http={codes.http} grpc={codes.grpc}{retry}"


def _command_lines(command: Any, path: str) -> Iterator[str]:
    """Walks commands by their attributes: typer brings a click of its own, or uses click."""
    for parameter in command.params:
        names = "/".join([*parameter.opts, *parameter.secondary_opts])
        environment = f" env={parameter.envvar}" if parameter.envvar else ""
        yield f"command {path} {names}{environment}"
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        yield f"command {path} {name}"
        yield from _command_lines(sub, f"{path} {name}")


def _file_lines(file: FileDescriptor) -> Iterator[str]:
    for _, service in sorted(file.services_by_name.items()):
        yield from _service_lines(service)
    yield from _message_lines(file.message_types_by_name.values())
    yield from _enum_lines(file.enum_types_by_name.values())


def _service_lines(service: ServiceDescriptor) -> Iterator[str]:
    for method in service.methods:
        arguments = ("stream " if method.client_streaming else "") + method.input_type.full_name
        answer = ("stream " if method.server_streaming else "") + method.output_type.full_name
        yield f"rpc {service.full_name}/{method.name} ({arguments}) -> ({answer})"


def _message_lines(messages: Iterable[Descriptor]) -> Iterator[str]:
    for message in sorted(messages, key=lambda m: m.full_name):
        yield f"message {message.full_name}"
        for field in sorted(message.fields, key=lambda f: f.number):
            yield f"field {message.full_name} {field.number} {_type(field)} {field.name}"
        yield from _message_lines(message.nested_types)
        yield from _enum_lines(message.enum_types)


def _enum_lines(enums: Iterable[EnumDescriptor]) -> Iterator[str]:
    for enum in sorted(enums, key=lambda e: e.full_name):
        for value in sorted(enum.values, key=lambda v: v.number):
            yield f"enum {enum.full_name} {value.number} {value.name}"


def _type(field: FieldDescriptor) -> str:
    kind = _TYPES[field.type]
    if field.message_type is not None:
        kind = field.message_type.full_name
    elif field.enum_type is not None:
        kind = field.enum_type.full_name
    oneof = f" oneof={field.containing_oneof.name}" if field.containing_oneof else ""
    return ("repeated " if field.is_repeated else "") + kind + oneof


if __name__ == "__main__":
    FROZEN.write_text(surface())
