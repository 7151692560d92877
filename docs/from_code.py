"""Parts of the manual that are made from the code while it is built, as Markdown."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer

from docs import notebook
from paramd.cli.main import app
from paramd.trainer.settings import AttachSettings
from paramd_service.alerts.config import AlertConfig
from paramd_service.control.base.config import ControlConfig
from paramd_service.edits.spec import EditConfig
from paramd_service.sidecar.config import SidecarConfig

ROOT = Path(__file__).resolve().parent.parent

EVERYWHERE = (
    ("PARAMD_JOB", "", "Name of the job, for clients and the command line (`--job`)"),
    ("PARAMD_URL", "", "URL of a control plane (`--url`); else the job is found in the state dir"),
    ("PARAMD_TOKEN", "", "Token for it. The command line takes `--token @FILE` or `--token -`"),
    ("PARAMD_CONTEXT", "", "Named context in `paramd.toml` (`--context`)"),
    ("PARAMD_OUTPUT", "table", "Output format of the command line (`-o`)"),
    ("PARAMD_DEBUG", "0", "1: tracebacks of errors (`--debug`)"),
    ("PARAMD_TRACE_PARTS", "0", "1: log each call of a part, with its time"),
    (
        "PARAMD_STATE_DIR",
        "`~/.local/state/paramd`",
        "Where jobs are found: endpoints, logs, stores",
    ),
    ("PARAMD_TLS_CA", "", "CA certificates that clients trust for https (`--tls-ca`)"),
    ("PARAMD_TLS_CLIENT_CERT", "", "Certificate that clients present, and helpers to each other"),
    ("PARAMD_TLS_CLIENT_KEY", "", "Its private key"),
    ("PARAMD_TLS_CERT", "", "Certificate of servers; required beyond loopback"),
    ("PARAMD_TLS_KEY", "", "Its private key"),
    ("PARAMD_TLS_CLIENT_CA", "", "Servers require client certificates from this CA"),
    ("PARAMD_ADVERTISE", "", "Host name or address that others reach this host's servers at"),
    ("PARAMD_SUMMON_TIMEOUT_S", "60", "Longest wait of `summon_full_params` for other ranks, s"),
    ("PARAMD_STORE_URL", "SQLite in the state dir", "Store of a control plane, also PostgreSQL"),
    ("PARAMD_READONLY", "0", "1: a control plane refuses every change"),
    ("PARAMD_ENGINE_TOKEN", "", "API key of the inference engine of `paramd follow --to`"),
    ("PARAMD_CUDA_DRIVER", "", "Library to load as the CUDA driver; empty: `libcuda.so.1`"),
    ("PARAMD_HIP_RUNTIME", "", "Library to load as HIP's runtime; empty: the one torch brought"),
    ("PARAMD_LOG_LEVEL", "INFO", "Level of a control plane's log"),
    ("PARAMD_DESTINATIONS", "the job's own", "Export destinations (JSON), see docs/exports.md"),
    ("PARAMD_ALERTS", "", "Settings of `[alerts]` as JSON, below"),
    ("PARAMD_EDITS", "", "Settings of `[edits]` as JSON, below"),
)
"""(variable, default, meaning) of what is read in more places than one."""


def settings() -> str:
    """Every setting: variable or key, default, meaning."""
    parts = ["## Everywhere", _table(EVERYWHERE)]
    parts += ["## A training: `paramd.attach`", _table(_of(AttachSettings, "PARAMD_{}".format))]
    parts += [
        "## A control plane: `paramd control serve --`",
        _table(_of(ControlConfig, lambda name: "--" + name.replace("_", "-").lower())),
        "## A sidecar: `paramd sidecar serve --`",
        "`attach` starts sidecars and passes these on; only a hand-made sidecar needs them.",
        _table(_of(SidecarConfig, lambda name: "--" + name.replace("_", "-").lower())),
        "## Alerts: `[alerts]` of `paramd.toml`",
        _table(_of(AlertConfig, str.lower)),
        "## Edits: `[edits]` of `paramd.toml`",
        _table(_of(EditConfig, str.lower)),
    ]
    return "\n\n".join(parts)


def _of(config: type[Any], name_of: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Rows of a dataclass whose fields have docstrings."""
    said = _field_docs(config)
    for field in fields(config):
        default = "" if field.default is MISSING or field.default is None else field.default
        shown = f"`{default}`" if default not in ("", ()) else ""
        yield name_of(field.name.upper()), shown, said.get(field.name, "")


def _field_docs(config: type[Any]) -> dict[str, str]:
    """The text below each field of a class."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return found


def _table(rows: Any) -> str:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, default, said in rows:
        lines.append(f"| `{name}` | {default} | {_cell(said)} |")
    return "\n".join(lines)


def cli() -> str:
    """Every command with its options, arguments and examples; what all take, once."""
    root = typer.main.get_command(app)
    common = [one for one in root.params if one.name in _COMMON]
    parts = ["## Everywhere", _options(common, typer.Context(root))]
    for name, command in sorted(getattr(root, "commands", {}).items()):
        parts += _command(f"paramd {name}", command, typer.Context(root))
    return "\n\n".join(parts)


_COMMON = ("job", "url", "token", "tls_ca", "context_name", "debug")


def _command(path: str, command: Any, context: Any) -> Iterator[str]:
    yield f"{'##' if path.count(' ') == 1 else '###'} {path}"
    yield _plain(command.help or "")
    own = [one for one in command.params if one.name not in (*_COMMON, "help")]
    shown = [one for one in own if not getattr(one, "hidden", False)]
    if shown:
        yield _options(shown, context)
    if command.epilog:
        lines = [line.strip() for line in command.epilog.splitlines() if line.strip()]
        examples = [line for line in lines if line.startswith("paramd ")]
        yield "\n".join(["```text", *(line.replace("\\[", "[") for line in examples), "```"])
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{path} {name}", below, context)


def _options(shown: Any, context: Any) -> str:
    rows = []
    for one in shown:
        names, said = one.get_help_record(context) or (one.name, "")
        rows.append(f"| `{names.replace('|', chr(92) + '|')}` | {_cell(said)} |")
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Help without rich's markup, and with what Markdown would eat escaped."""
    text = text.replace("\b", "").replace("\\[", "[")
    parts = text.split("`")
    # Every second part stands between backticks.
    parts[::2] = [re.sub(r"([*<\[\]])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"docs/([\w/-]+)\.md", r"[\1](/\1.md)", part) for part in parts[::2]]
    return "`".join(parts)


def rest() -> str:
    """Every route with its parameters and answers, from openapi.json."""
    document = json.loads((ROOT / "client/web/openapi.json").read_text())
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            tag = (route.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).append(_route(method.upper(), path, route))
    parts = [f"## {tag}\n\n" + "\n\n".join(by_tag[tag]) for tag in by_tag]
    types = document["components"]["schemas"]
    parts += ["## Types", *(_type(name, types[name]) for name in sorted(types))]
    return "\n\n".join(parts)


def _type(name: str, schema: dict[str, Any]) -> str:
    """One type of bodies and answers: its fields, or its values."""
    lines = [f"### {name}", _plain(schema.get("description", ""))]
    if "enum" in schema:
        lines.append("One of " + ", ".join(f"`{one}`" for one in schema["enum"]) + ".")
    needed = schema.get("required", ())
    rows = [
        f"| `{field}` | {_schema(one)}{'' if field in needed else ', optional'} "
        f"| {_cell(one.get('description', ''))} |"
        for field, one in schema.get("properties", {}).items()
    ]
    if rows:
        lines.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(line for line in lines if line)


def _route(method: str, path: str, route: dict[str, Any]) -> str:
    lines = [f"### {method} {path}", _plain(route.get("description") or route.get("summary", ""))]
    rows = [_parameter(one) for one in route.get("parameters", ())]
    if rows:
        lines.append("| parameter | in | meaning |\n|---|---|---|\n" + "\n".join(rows))
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    if body:
        lines.append(f"Body: `{_schema(body['schema'])}`.")
    answers = [
        f"{status} `{_schema(found['schema'])}`"
        for status, answer in route["responses"].items()
        for found in answer.get("content", {}).values()
        if status.startswith("2") and "schema" in found
    ]
    if answers:
        lines.append(f"Answer: {', '.join(answers)}.")
    return "\n\n".join(lines)


def _parameter(one: dict[str, Any]) -> str:
    said = _cell(one.get("description", ""))
    needed = "" if one.get("required") else ", optional"
    return f"| `{one['name']}` | {one['in']}{needed} | {said} |"


def _schema(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_schema(one) for one in schema["anyOf"])
    if schema.get("type") == "array" and "items" in schema:
        return f"{_schema(schema['items'])}[]"
    return str(schema.get("type", "object"))


def changelog() -> str:
    """CHANGELOG.md below its title."""
    text = (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]
    return text.replace("](docs/", "](")


MARKDOWN: dict[str, Callable[[], str]] = {
    "settings": settings,
    "cli": cli,
    "rest": rest,
    "changelog": changelog,
    "notebook": notebook.markdown,
}
"""What a line `<!-- from the code: NAME -->` of a page stands for."""
