"""User permissions: a role is a set of actions, and every REST operation needs one action.

    viewer < reader < editor   < admin
                    < exporter <
    viewer < trainer           <

An operation that is not listed is for admins only.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final

from paramd.security.tickets import Role


class UserRole(StrEnum):
    """Role of a token."""

    VIEWER = "viewer"
    READER = "reader"
    EDITOR = "editor"
    EXPORTER = "exporter"
    TRAINER = "trainer"
    ADMIN = "admin"


class Action(Enum):
    """Kind of access that a request needs."""

    VIEW = "view"
    """See jobs, ranks, names, shapes, metrics, alerts, events, and statistics of whole tensors
    of at least `SMALL_NUMEL` elements: those of a smaller one reveal its values."""
    READ = "read"
    """See values of parameters, whole or in part."""
    LOGS = "logs"
    """See what trainers print and sidecars log. A script may print anything, secrets too, so this
    takes more than reading parameters; a read-only control plane still shows it."""
    EDIT = "edit"
    """Change parameters; pause and step training."""
    EDIT_ANY = "edit-any"
    """Commit and abort edits of other tokens; step and end others' holds."""
    EXPORT = "export"
    """Write checkpoints to destinations that the operator allows."""
    TUNNEL = "tunnel"
    """Reach sidecars through the control plane's port, where nothing else reaches them."""
    ATTACH = "attach"
    """Register a training job."""
    ADMINISTER = "administer"
    """Tokens, audit, and every operation without another action."""


_VIEWER: Final = frozenset({Action.VIEW})
_READER: Final = _VIEWER | {Action.READ, Action.TUNNEL}

PERMITTED: Final[dict[UserRole, frozenset[Action]]] = {
    UserRole.VIEWER: _VIEWER,
    UserRole.READER: _READER,
    UserRole.EDITOR: _READER | {Action.EDIT, Action.LOGS},
    UserRole.EXPORTER: _READER | {Action.EXPORT},
    UserRole.TRAINER: _VIEWER | {Action.ATTACH},
    UserRole.ADMIN: frozenset(Action),
}

_OPERATIONS: Final[dict[Action, str]] = {
    Action.VIEW: (
        "get_openapi get_metrics get_rank_metrics get_session create_session create_sign_in_code "
        "delete_session list_jobs get_job list_ranks list_incarnations list_alerts follow_events "
        "follow_grads get_history list_series list_params get_param get_stats get_histogram "
        "list_exports get_export list_schedules list_destinations list_edits get_edit list_marks "
        "get_pause"
    ),
    Action.READ: (
        "get_why get_updates get_diff get_spectrum get_heatmap get_values list_snapshots "
        "create_snapshot get_snapshot renew_snapshot release_snapshot get_hyperparameters"
    ),
    Action.LOGS: "get_rank_log",
    Action.EDIT: (
        "read_export_file load_export create_edit commit_edit preview_edit undo_edit abort_edit "
        "create_mark delete_mark create_rollback set_hyperparameters begin_pause renew_pause "
        "step_pause end_pause set_watch"
    ),
    Action.EXPORT: (
        "create_export cancel_export store_export_asset create_schedule delete_schedule"
    ),
    Action.TUNNEL: "open_tunnel open_control_tunnel",
    Action.ATTACH: "register_job",
    Action.ADMINISTER: (
        "end_job list_audit list_own_audit create_token list_tokens revoke_token add_destination "
        "list_other_jobs list_other_series get_other_history"
    ),
}
OPERATIONS: Final = {name: action for action, of in _OPERATIONS.items() for name in of.split()}
"""Action of each REST operation, by its operationId."""

OF_NO_JOB: Final = frozenset(
    ("list_jobs", "register_job", "list_destinations", "get_openapi", "get_session")
) | {"create_session", "create_sign_in_code", "delete_session"}
"""Operations without a job in their path that tokens for some jobs may call."""

_RECORDS: Final = (
    "get_openapi get_metrics get_session create_session create_sign_in_code delete_session "
    "list_jobs get_job list_ranks list_incarnations list_alerts follow_events get_history "
    "list_series list_exports get_export list_schedules list_destinations list_edits get_edit "
    "list_audit list_own_audit list_tokens list_other_jobs list_other_series get_other_history"
)
OF_RECORDS: Final = frozenset(_RECORDS.split())
"""Operations that need no rank, only what is stored: those that a job which has ended answers."""

SMALL_NUMEL: Final = 64
"""Statistics of fewer elements count as values, and need a reader."""

ELEMENTS_OF_BIN: Final = 16
"""Fewest elements per bin of a histogram for viewers; finer ones need a reader."""


def needed_action(operation: str, query: str = "") -> Action:
    """The action that an operation needs. Statistics of a slice reveal its values, down to a single
    one, so a bracket anywhere in the (decoded) query requires a reader."""
    needed = OPERATIONS.get(operation, Action.ADMINISTER)
    return Action.READ if needed is Action.VIEW and "[" in query else needed


_DOING: Final[dict[Action, str]] = {
    Action.VIEW: "seeing a job",
    Action.READ: "reading values",
    Action.LOGS: "reading logs",
    Action.EDIT: "changing a training",
    Action.EDIT_ANY: "changing what others have begun",
    Action.EXPORT: "exporting",
    Action.TUNNEL: "reading through the control plane",
    Action.ATTACH: "attaching a training",
    Action.ADMINISTER: "administration",
}


def why_refused(role: UserRole, action: Action) -> str:
    """Return the text of a refusal: the token's role, the least role that permits the action, and
    how to get a token of that role."""
    least = next(one for one in UserRole if may(one, action))
    return (
        f"this token's role is {role}; {_DOING[action]} needs {least}. Ask an admin for such a "
        f"token: paramd token create --role {least}"
    )


def may(role: UserRole, action: Action) -> bool:
    return action in PERMITTED[role]


def allowed(role: UserRole, *, readonly: bool) -> list[Action]:
    """The role's actions here, in the order of `Action`; `readonly` removes all changes."""
    taken = {Action.EDIT, Action.EDIT_ANY, Action.EXPORT} if readonly else set()
    return [action for action in Action if action in PERMITTED[role] - taken]


def ticket_role(role: UserRole, *, readonly: bool = False) -> Role:
    """The role of the sidecar tickets issued to a user of this role."""
    may_do = allowed(role, readonly=readonly)
    if Action.EDIT in may_do:
        return Role.EDITOR
    return Role.READER if Action.READ in may_do else Role.VIEWER
