"""Names of earlier releases, and their replacements: one table for all doors.

The command line, the settings, REST and Python look an unknown name up here, and name its
replacement. A row stays for one release.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from paramd.errors import GoneError, UnknownNameError, UsageError

API = "/api/v1"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

Door = Literal["command", "flag", "setting", "variable", "rest", "python"]


class Gone(NamedTuple):
    """One removed name."""

    door: Door
    """Where the name was used."""
    name: str
    """As a user wrote it: a command ("alerts silence"), a flag with its command ("exports
    --every-s"), a setting's field ("standby"; its variable, option and keyword of `attach` follow
    from it; door "variable": the variable alone) or a table's key in paramd.toml
    ("alerts.pending_s"), a method and a path below /api/v1 with `{}` for each parameter ("POST
    /jobs/{}/silences"), or a Python name: with its class ("Mesh.silence", which is AsyncMesh's
    too), a keyword of a method ("Mesh.export(every_s)"), or of the module ("paramd.silence")."""
    instead: str
    """The advice, as the rest of a sentence: "use ..."."""


GONE: tuple[Gone, ...] = (
    Gone("command", "check", "use `paramd verify`"),
    Gone("command", "log", "use `paramd track` (`paramd logs` shows what the ranks printed)"),
    Gone("command", "end", "use `paramd cleanup`"),
    Gone("flag", "track --looks", "use --samples"),
    Gone("flag", "export --to-client", "use `paramd summon '*' --buffers -f FILE.safetensors`"),
    Gone("flag", "grads --every", "use --every-steps"),
    Gone("flag", "follow --every", "use --every-steps"),
    Gone("flag", "summon --force", "use --overwrite"),
    Gone("flag", "summon --output", "use --file (-f)"),
    Gone("flag", "summon -o", "use -f FILE (-o is the format, in commands that print tables)"),
    Gone("rest", "GET /jobs/{}/hold", "use /pause"),
    Gone("rest", "POST /jobs/{}/hold", "use /pause"),
    Gone("rest", "POST /jobs/{}/hold/renew", "use /pause/renew"),
    Gone("rest", "POST /jobs/{}/hold/step", "use /pause/step"),
    Gone("rest", "DELETE /jobs/{}/hold", "use /pause"),
    Gone("setting", "alerts.hold", "use pause"),
    Gone("python", "Mesh.download(moved)", "use progress="),
    Gone("python", "Mesh.download(said)", "use on_message="),
    Gone("python", "Mesh.download(replace)", "use overwrite="),
    Gone("python", "Mesh.restore(moved)", "use progress="),
    Gone("python", "Attachment.keeping", "use resume_cost()"),
    Gone("python", "Attachment.follow", "give the optimizers to attach"),
    Gone("python", "Attachment.holds", "compare with the ids of model.parameters()"),
    Gone("python", "Attachment.track", "use attach(log=)"),
    Gone("python", "Attachment.at_detach", "do it after detach()"),
    Gone(
        "flag",
        "export-schedule create --every",
        "use --every-steps, or run `paramd export` from cron (docs/exports.md)",
    ),
    Gone("flag", "audit verify --head", "compare the hash that it prints with one you kept"),
    Gone("flag", "audit verify --offline", "leave it out: an ended job's store is read by itself"),
    Gone(
        "rest",
        "POST /jobs/{}/alerts/acknowledge",
        "silence the alert in Prometheus' Alertmanager while you work on it (docs/alerts.md)",
    ),
    Gone("rest", "GET /jobs/{}/alert-silences", "use amtool silence query (docs/alerts.md)"),
    Gone("rest", "POST /jobs/{}/alert-silences", "use amtool silence add (docs/alerts.md)"),
    Gone("rest", "DELETE /jobs/{}/alert-silences/{}", "use amtool silence expire (docs/alerts.md)"),
    Gone(
        "setting",
        "alerts.webhook_attempts",
        "have Prometheus' Alertmanager deliver what must arrive (docs/alerts.md)",
    ),
    Gone("setting", "alerts.webhook_timeout_s", "leave it out: it is 5 s"),
    Gone(
        "setting", "alerts.straggler_hold_s", "set stall_window_s: a straggler is slow at both ends"
    ),
    Gone("setting", "alerts.clear_after_s", "leave it out: it is 5 s"),
    Gone("variable", "optimizer", "unset it: optimizer state is read where it lies"),
    Gone(
        "setting",
        "certificate_s",
        "leave it out: a certificate lasts for its incarnation, a year at most",
    ),
)
"""Every name that this release removed, in the order of the CHANGELOG."""


RENAMED: Mapping[str, str] = {
    "Mesh.replay": "verify",
    "Attachment.kept": "end_iteration",
    "Attachment.goes_on": "begin_iteration",
    "Attachment.rewindable": "rollback_scope",
    "Attachment.not_training_weights": "swapped_weights",
    "Mesh.hold_state": "pause_state",
    "Mesh.writeback(hold)": "pause",
    "PauseState.held": "paused",
    "paramd.mesh.edits.calls.Hold": "PauseState",
    "attach(keep)": "extra_state",
    "connect(timeout_s)": "timeout",
    "Mesh.pause(lease_s)": "lease",
    "Mesh.export(timeout_s)": "timeout",
}
"""Names that scripts have in their loops: for this release they work, with a warning."""


_MEANT: Mapping[str, str] = {
    "Mesh.keys": "mesh.names(), or `for name in mesh`",
    "Mesh.lr Mesh.learning_rate Mesh.param_groups Mesh.hparams": (
        "mesh.hyperparameters(), and mesh.set_hyperparameters(lr=...)"
    ),
    "Mesh.items Mesh.values Mesh.parameters Mesh.named_parameters Mesh.read Mesh.get": (
        "mesh.summon('*'), a dict of tensors by name"
    ),
    "Mesh.ranks": "mesh.status(), a row for each rank, or mesh.world_size",
    "Mesh.stat": "mesh.stats()",
    "Mesh.gradients": "mesh.grads('*')",
    "Mesh.save Mesh.checkpoint Mesh.snapshot": (
        "mesh.export('DEST/KEY'), mesh.download('FILE.safetensors') or mesh.mark('NAME')"
    ),
    "Mesh.set_lr": "mesh.set_hyperparameters(lr=...)",
    "Mesh.stop Mesh.hold": "mesh.pause() (paramd never ends a training)",
    "Mesh.unpause": "mesh.resume()",
    "Summoned.to Summoned.cuda Summoned.half": "mesh.summon(..., device=..., dtype=...)",
    "Summoned.diff Summoned.allclose": "mesh.diff(found, other), or found == other",
    "Summoned.to_pandas": "mesh.stats(...).to_pandas(), or found.numpy()",
    "Table.plot Table.hist Table.bar": "table.to_pandas().plot()",
    "Table.to_json Table.json": "json.dumps(table.to_dict())",
    "Table.to_csv Table.head Table.describe": "table.to_pandas(), a DataFrame",
    "Parameter.tensor Parameter.data Parameter.value Parameter.values Parameter.item "
    "Parameter.tolist Parameter.cpu Parameter.cuda Parameter.to Parameter.float": (
        "mesh[name].summon(), its tensor"
    ),
    "Parameter.mean Parameter.std Parameter.min Parameter.max": "mesh[name].stats()",
    "Parameter.grad": "mesh.grads(name)",
    "Parameter.fill_ Parameter.zero_ Parameter.mul_ Parameter.add_ Parameter.copy_ Parameter.set": (
        "mesh[name].edit(mul=...), or fill=, add=, set="
    ),
    "paramd.jobs paramd.list_jobs": "paramd.places.running_jobs(), or `paramd jobs`",
    "paramd.Job paramd.summon paramd.status": "paramd.connect('JOB')",
    "paramd.open paramd.client paramd.Client": "paramd.connect('JOB')",
    "paramd.connect_async paramd.aconnect paramd.async_connect": "paramd.aio.connect('JOB')",
    "paramd.init paramd.start paramd.serve paramd.wrap paramd.watch paramd.register": (
        "paramd.attach(model, optimizer, job=...) in the training"
    ),
    "paramd.load paramd.read paramd.get paramd.state_dict": "paramd.connect('JOB').summon('*')",
    "paramd.save paramd.export paramd.checkpoint": "paramd.connect('JOB').export('DEST/KEY')",
    "paramd.detach": "attachment.detach(), of what paramd.attach returns",
    "connect(context)": "url=, token= or job= (contexts are of the command line)",
    "connect(name) connect(run) connect(job_name)": "job=",
    "connect(address) connect(host) connect(endpoint)": "url=",
    "attach(name) attach(run) attach(run_name) attach(job_name) attach(project)": "job=",
    "attach(optim) attach(optimizers)": "optimizer=, one or several",
    "attach(url)": "control=",
}
"""First guesses that never existed, and what to use instead."""


def check(door: Door, name: str, shown: str) -> None:
    """Raise GoneError, with the name as `shown`, for a name of an earlier release;
    UnknownNameError for a guess."""
    for guesses, meant in _MEANT.items():
        if door == "python" and name in guesses.split():
            raise UnknownNameError(f"there is no {shown}: use {meant}")
    for row in GONE:
        if (row.door, row.name) == (door, name):
            raise GoneError(_said(shown, row))


def command_line(path: Sequence[str], given: Sequence[str], refusal: str) -> GoneError | None:
    """The removed name among the words `given`, if the command at `path` refused it by name."""
    refused = re.findall(r"[\w-]+", refusal)
    typed = [word.partition("=")[0] for word in given]
    for row in GONE:
        words = row.name.split()
        rest = words[len(path) :]
        if row.door not in ("command", "flag") or [*path, *rest] != words or not rest:
            continue
        # Together, but not first: options may stand before a command.
        if rest[0] in refused and any(typed[at:][: len(rest)] == rest for at in range(len(typed))):
            return GoneError(_said(f"`paramd {row.name}`", row))
    return None


def check_options(arguments: Sequence[str]) -> None:
    """Raise GoneError for an option of a service's own command line."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--"):
            check("setting", option[2:].replace("-", "_"), option)


def variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings, never errors, about PARAMD_* variables that nothing reads any more."""
    doors = ("setting", "variable")
    settings = {f"PARAMD_{row.name.upper()}": row for row in GONE if row.door in doors}
    return [_said(name, row) for name, row in settings.items() if name in environment]


def operation(method: str, path: str) -> Gone | None:
    """The row of a request to REST."""
    if not path.startswith(API):
        return None
    asked = f"{method} {path.removeprefix(API)}"
    return next((row for shape, row in _operations() if shape.fullmatch(asked)), None)


@functools.cache
def _operations() -> tuple[tuple[re.Pattern[str], Gone], ...]:
    """The shape of each removed operation of REST."""
    return tuple(
        (re.compile(re.escape(row.name).replace(r"\{\}", "[^/]+")), row)
        for row in GONE
        if row.door == "rest"
    )


def renamed(of: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a function by their present names; UsageError if one has both of its names."""
    found = dict(named)
    for keyword in named:
        if new := RENAMED.get(f"{of}({keyword})"):
            if new in found:
                raise UsageError(f"{of}: {keyword}= is now {new}=; give only {new}=")
            warnings.warn(f"{of}({keyword}=) is now {new}=", FutureWarning, stacklevel=3)
            value = found.pop(keyword)
            # timeout_s=None meant the default, which timeout=None does not.
            found |= {new: value} if new != "timeout" or value is not None else {}
    return found


def keywords(of: str) -> Callable[[_Function], _Function]:
    """Decorator: as `check` for a keyword of the function, such as "attach(standby)"."""

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            named = renamed(of, named)
            for keyword in named:
                check("python", f"{of}({keyword})", f"{of}({keyword}=...)")
                if of == "attach":
                    check("setting", keyword, f"{of}({keyword}=...)")
            return function(*args, **named)

        return cast("_Function", checked)

    return decorated


def attribute(of: str, holder: object, name: str) -> Any:
    """What `holder` has by the present name, with a warning. Raises as `check`; AttributeError."""
    if new := RENAMED.get(f"{of}.{name}"):
        more = "; compare its state with 'paused', not 'held'" if new == "pause_state" else ""
        warnings.warn(f"{of}.{name} is now {of}.{new}{more}", FutureWarning, stacklevel=3)
        return getattr(holder, new)
    check("python", f"{of}.{name}", f"{of}.{name}")
    if isinstance(holder, ModuleType):
        raise AttributeError(f"module {of!r} has no attribute {name!r}", name=name, obj=holder)
    # Python's own error, which suggests names.
    return object.__getattribute__(holder, name)


def tells(kind: _Class) -> _Class:
    """Class decorator: attributes and methods' keywords raise as `check`."""
    of = kind.__name__.removeprefix("Async")
    kind.__getattr__ = lambda self, name: attribute(of, self, name)  # type: ignore[attr-defined]
    gone = (*(row.name for row in GONE), *RENAMED)
    for method in {name.partition("(")[0] for name in gone if "(" in name}:
        owner, _, name = method.partition(".")
        function = getattr(kind, name, None)
        if owner == of and function is not None:
            setattr(kind, name, keywords(method)(function))
    return kind


def _said(shown: str, row: Gone) -> str:
    return f"{shown} is gone: {row.instead}"
