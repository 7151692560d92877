"""What REST asks and answers about edits, restore points and pauses.

Descriptions appear in the OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paramd.layout.edits.kinds import BY_WORD
from paramd.mesh.edits.calls import Edit, Mark
from paramd.wire import LEASE_S, MAX_AGREE_S, MAX_LEASE_S
from paramd_service.control.api.models import Request, WaitRequest
from paramd_service.edits.pauses import MAX_STEPS

MAX_OPS = 10_000
EDIT_ID = "^[0-9a-f]{32}$"

HyperparameterName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
HyperparameterValue = (
    Annotated[float, Field(allow_inf_nan=False)]
    | Annotated[
        list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1, max_length=16)
    ]
)

EditStateName = Literal["STAGING", "STAGED", "COMMITTED", "APPLIED", "ABORTED", "LOST"]


def _known(word: str) -> str:
    if word not in BY_WORD:
        raise PydanticCustomError("kind", "expected one of {words}", {"words": ", ".join(BY_WORD)})
    return word


OpWord = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*BY_WORD]})]


class OpRequest(BaseModel):
    """One operation on the elements that a pattern names."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"pattern": "norm.*", "op": "mul", "value": 0.5}]},
    )

    pattern: str = Field(
        min_length=1,
        max_length=1024,
        description='Glob over parameter names; may end in a slice: "w[0:4]"',
    )
    op: OpWord
    value: float | None = Field(
        None, description="Operand of fill, and of add and mul without data"
    )
    weight: float | None = Field(None, description="Factor of add (1 when absent) and of lerp")
    min: float | None = Field(None, description="Lower bound of clamp")
    max: float | None = Field(None, description="Upper bound of clamp")
    data: bool = Field(False, description="The operand is uploaded to the sidecars")


class EditRequest(WaitRequest):
    """An edit, applied on all ranks at one step or on none."""

    id: str | None = Field(
        None, pattern=EDIT_ID, description="Idempotency id, never reusable; generated when absent"
    )
    ops: list[OpRequest] = Field(min_length=1, max_length=MAX_OPS)
    if_step: int | None = Field(
        None,
        ge=0,
        le=1 << 62,
        description="Apply at the boundary of this step, or abort. Pause training first, or it "
        "moves past the step before all ranks have agreed",
    )
    allow_nonfinite: bool = Field(False, description="Permit NaN and infinities; admins only")
    reset_moments: bool = Field(
        False, description="Zero the optimizer's state of the changed elements"
    )
    note: str = Field("", max_length=1000, description="Reason, for the audit")
    dry_run: bool = Field(False, description="Only compute the statistics before and after")


class UndoRequest(WaitRequest):
    """How to undo."""

    id: str | None = Field(None, pattern=EDIT_ID, description="Id of the new edit; as in create")
    force: bool = Field(False, description="Undo even if later edits changed the same elements")
    dry_run: bool = Field(False, description="Change nothing; compute `before` and `after`")


class HyperparametersRequest(WaitRequest):
    """Values of one parameter group, set on all ranks at one step or on none."""

    id: str | None = Field(None, pattern=EDIT_ID, description="Id of the edit; as in create_edit")
    optimizer: int = Field(
        0, ge=0, le=1000, description="Index among the optimizers given to attach"
    )
    group: int = Field(0, ge=0, le=1_000_000, description="Index among its param_groups")
    values: dict[HyperparameterName, HyperparameterValue] = Field(
        min_length=1,
        max_length=64,
        description="By name, such as lr, betas or weight_decay; a list where it has a tuple",
    )
    note: str = Field("", max_length=1000, description="Reason, for the audit")


class GroupDocument(BaseModel):
    """Hyper-parameters of one group of an optimizer, both by their index."""

    optimizer: int
    group: int
    values: dict[str, Any]


class HyperparameterList(BaseModel):
    """Those of all optimizers."""

    step: int
    groups: list[GroupDocument]


class RollbackRequest(WaitRequest):
    """Which state to put training back to; exactly one of mark and step."""

    id: str | None = Field(None, pattern=EDIT_ID, description="Id of the edit; as in create_edit")
    mark: str | None = Field(
        None, min_length=1, max_length=64, description="Name of a restore point"
    )
    step: int | None = Field(
        None, ge=0, le=1 << 62, description="Step of a restore point or of a standing snapshot"
    )
    note: str = Field("", max_length=1000, description="Reason, for the audit")

    @model_validator(mode="after")
    def _one_of_them(self) -> RollbackRequest:
        if (self.mark is None) == (self.step is None):
            raise ValueError("give exactly one of mark and step")
        return self


class MarkRequest(Request):
    """Under which name to keep a state."""

    name: str = Field(
        min_length=1,
        max_length=64,
        description="Printable, not only digits, without '/' and without a dot at the beginning",
    )


class DroppedMark(BaseModel):
    """Whether a restore point was deleted."""

    dropped: bool


class MarkList(BaseModel):
    """States that training can be put back to, lowest step first."""

    marks: list[Mark]


class EditList(BaseModel):
    """Edits, newest first."""

    edits: list[Edit]
    next_page_token: str = Field(description="Pass it to get older ones; empty at the end")


class HolderRequest(Request):
    """Which pause is meant."""

    holder: str = Field(
        "",
        max_length=128,
        description="Holder returned by begin_pause; empty: the pause of this token",
    )


class PauseRequest(HolderRequest):
    """A pause's lease."""

    lease_s: float = Field(
        LEASE_S,
        ge=1,
        le=MAX_LEASE_S,
        allow_inf_nan=False,
        description="Seconds from now; training resumes when they are over",
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=MAX_AGREE_S,
        allow_inf_nan=False,
        description="Seconds for all ranks to agree on a pause; None: 60 and four of their steps",
    )
    id: str = Field("", max_length=32, description="Chosen by the caller of begin_pause")


class StepRequest(HolderRequest):
    """How many updates to step."""

    steps: int = Field(1, ge=1, le=MAX_STEPS, description="Updates to finish")
