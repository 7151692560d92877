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
    """See what trainers print and sidecars log. Whatever a script prints is in there, secrets too,
    so it takes more than reading parameters; a control plane that is read-only still shows it."""
    EDIT = "edit"
    """Change parameters; pause and step training."""
    EDIT_ANY = "edit-any"
    """Commit and abort edits that another token made; step and end another's hold."""
    EXPORT = "export"
    """Write checkpoints to destinations that the operator allows."""
    TUNNEL = "tunnel"
    """Reach sidecars through the control plane's port, from where nothing else reaches them."""
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

OPERATIONS: Final[dict[str, Action]] = {
    "get_openapi": Action.VIEW,
    "get_metrics": Action.VIEW,
    "get_rank_metrics": Action.VIEW,
    "get_session": Action.VIEW,
    "create_session": Action.VIEW,
    "create_sign_in_code": Action.VIEW,
    "delete_session": Action.VIEW,
    "list_jobs": Action.VIEW,
    "register_job": Action.ATTACH,
    "get_job": Action.VIEW,
    "list_ranks": Action.VIEW,
    "open_tunnel": Action.TUNNEL,
    "open_control_tunnel": Action.TUNNEL,
    "list_incarnations": Action.VIEW,
    "get_why": Action.READ,
    "get_rank_log": Action.LOGS,
    "get_updates": Action.READ,
    "get_diff": Action.READ,
    "get_spectrum": Action.READ,
    "list_alerts": Action.VIEW,
    "follow_events": Action.VIEW,
    "follow_grads": Action.VIEW,
    "get_history": Action.VIEW,
    "list_series": Action.VIEW,
    "list_params": Action.VIEW,
    "get_param": Action.VIEW,
    "get_stats": Action.VIEW,
    "get_histogram": Action.VIEW,
    "get_heatmap": Action.READ,
    "get_values": Action.READ,
    "list_snapshots": Action.READ,
    "create_snapshot": Action.READ,
    "get_snapshot": Action.READ,
    "renew_snapshot": Action.READ,
    "release_snapshot": Action.READ,
    "list_exports": Action.VIEW,
    "get_export": Action.VIEW,
    "create_export": Action.EXPORT,
    "cancel_export": Action.EXPORT,
    "store_export_asset": Action.EXPORT,
    "list_schedules": Action.VIEW,
    "create_schedule": Action.EXPORT,
    "delete_schedule": Action.EXPORT,
    "list_destinations": Action.VIEW,
    "read_export_file": Action.EDIT,
    "list_edits": Action.VIEW,
    "get_edit": Action.VIEW,
    "create_edit": Action.EDIT,
    "commit_edit": Action.EDIT,
    "preview_edit": Action.EDIT,
    "undo_edit": Action.EDIT,
    "abort_edit": Action.EDIT,
    "list_marks": Action.VIEW,
    "create_mark": Action.EDIT,
    "delete_mark": Action.EDIT,
    "create_rollback": Action.EDIT,
    "get_hyperparameters": Action.READ,
    "set_hyperparameters": Action.EDIT,
    "get_hold": Action.VIEW,
    "begin_hold": Action.EDIT,
    "renew_hold": Action.EDIT,
    "step_hold": Action.EDIT,
    "end_hold": Action.EDIT,
    "end_job": Action.ADMINISTER,
    "list_audit": Action.ADMINISTER,
    "list_own_audit": Action.ADMINISTER,
    "create_token": Action.ADMINISTER,
    "list_tokens": Action.ADMINISTER,
    "revoke_token": Action.ADMINISTER,
}
"""Action of each REST operation, by its operationId."""

OF_NO_JOB: Final = frozenset(
    ("list_jobs", "register_job", "list_destinations", "get_openapi", "get_session")
) | {"create_session", "create_sign_in_code", "delete_session"}
"""Operations without a job in their path that tokens for some jobs may call."""

SMALL_NUMEL: Final = 64
"""Statistics of fewer elements count as values, and need a reader."""

ELEMENTS_OF_BIN: Final = 16
"""Fewest elements per bin of a histogram for viewers; finer ones need a reader."""


def needed_action(operation: str, query: str = "") -> Action:
    """The action that an operation needs.

    Statistics of a slice reveal its values, down to a single one, so a bracket anywhere in the
    (decoded) query requires a reader.
    """
    needed = OPERATIONS.get(operation, Action.ADMINISTER)
    return Action.READ if needed is Action.VIEW and "[" in query else needed


def may(role: UserRole, action: Action) -> bool:
    """Whether the role permits the action."""
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
