"""Documents of edits and holds, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from paramd.layout.edits.kinds import BY_WORD
from paramd.wire import LEASE_S, MAX_LEASE_S
from paramd_service.control.edits.holds import MAX_STEPS

MAX_OPS = 10_000
EDIT_ID = "^[0-9a-f]{32}$"

EditStateName = Literal["STAGING", "STAGED", "COMMITTED", "APPLIED", "ABORTED", "LOST"]


def _known(word: str) -> str:
    if word not in BY_WORD:
        raise PydanticCustomError("kind", "expected one of {words}", {"words": ", ".join(BY_WORD)})
    return word


OpWord = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*BY_WORD]})]


class OpRequest(BaseModel):
    """What is done to the elements that a pattern names."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"pattern": "norm.*", "op": "mul", "value": 0.5}]},
    )

    pattern: str = Field(
        min_length=1,
        max_length=1024,
        description='Glob over names of parameters; may end in a slice: "w[0:4]"',
    )
    op: OpWord
    value: float | None = Field(None, description="Operand of fill; of add and mul without data")
    weight: float | None = Field(None, description="Factor of add (1 when absent) and of lerp")
    min: float | None = Field(None, description="Lower bound of clamp")
    max: float | None = Field(None, description="Upper bound of clamp")
    data: bool = Field(False, description="The operand is uploaded to the sidecars")


class EditRequest(BaseModel):
    """An edit to be made, on all ranks at one step or on none."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(
        None,
        pattern=EDIT_ID,
        description="Names it for ever: asking twice makes it once; made up when absent",
    )
    ops: list[OpRequest] = Field(min_length=1, max_length=MAX_OPS)
    if_step: int | None = Field(
        None,
        ge=0,
        le=1 << 62,
        description="Apply it at the boundary of this step, or abort: hold training first, or it "
        "goes on before all ranks have agreed",
    )
    allow_nonfinite: bool = Field(False, description="NaN and infinities are wanted; admins only")
    reset_moments: bool = Field(
        False, description="Zero the optimizer's state of the changed elements"
    )
    note: str = Field("", max_length=1000, description="Why; for the audit")
    dry_run: bool = Field(False, description="Only tell the numbers before and after")
    wait_s: float = Field(
        30.0, ge=0, le=300, allow_inf_nan=False, description="Longest wait for its end, in seconds"
    )


class WaitRequest(BaseModel):
    """How long to wait."""

    model_config = ConfigDict(extra="forbid")

    wait_s: float = Field(
        30.0, ge=0, le=300, allow_inf_nan=False, description="Longest wait for its end, in seconds"
    )


class UndoRequest(WaitRequest):
    """How to undo."""

    id: str | None = Field(None, pattern=EDIT_ID, description="Of the undoing edit; as in create")
    force: bool = Field(False, description="Although later edits changed some of the elements")


class OpDocument(BaseModel):
    """One operation, and what it met. Its numbers are null where it has none, or when they are
    not for your token's role."""

    pattern: str
    op: str
    value: float | None
    weight: float | None
    min: float | None
    max: float | None
    data: bool
    names: list[str] = Field(description="The first 100 parameters")
    name_count: int
    numel: int = Field(description="Elements, replicas counted once")


class RangeDocument(BaseModel):
    """Statistics of all elements that an edit names. null: there is no finite one."""

    min: float | None
    max: float | None
    mean: float | None
    norm: float | None
    nan_count: int
    inf_count: int


class UndoDocument(BaseModel):
    """Whether it can be undone."""

    possible: bool
    reason: str = Field(description="Why not; empty when it can")


class EditDocument(BaseModel):
    """An edit as it is told now."""

    id: str
    job: str
    epoch: int
    state: EditStateName = Field(description="APPLIED, ABORTED and LOST never change")
    reason: str = Field(description="Why it is ABORTED or LOST; else empty")
    actor: str = Field(description="Name of the token of who asked for it")
    committed_by: str | None = Field(description="And of who had it applied; null: nobody yet")
    note: str
    dry_run: bool = Field(description="It was only to tell before and after; it ends as ABORTED")
    created_s: float = Field(description="Seconds since the Unix epoch")
    ended_s: float | None = Field(description="null while it goes on")
    step: int = Field(description="Step at whose boundary it was applied; -1: it was not")
    boundary: int = Field(description="Number of its request to the trainers; 0: none yet")
    ops: list[OpDocument]
    size_bytes: int = Field(description="Of the elements it names, replicas counted once")
    stop_ms: float | None = Field(description="Longest time that it kept a trainer")
    before: RangeDocument | None = Field(
        description="null: not known, or not for your token's role"
    )
    after: RangeDocument | None
    undo: UndoDocument
    undo_of: str | None = Field(description="Edit that this one undoes")
    undone_by: str | None = Field(description="Edit that has undone this one")


class EditList(BaseModel):
    """Edits, newest first."""

    edits: list[EditDocument]
    next_page_token: str = Field(description="Ask with it for older ones; empty at the end")


class HoldDocument(BaseModel):
    """Whether training waits at a boundary on request."""

    state: Literal["running", "pausing", "held", "stepping"]
    holder: str = Field(description="Who holds it: name of the token, and a mark of its own")
    step: int = Field(description="Finished updates; -1 when no rank tells")
    steps_left: int = Field(description="Boundaries that may pass before it waits again")
    lease_left_s: float
    since_s: float | None = Field(description="Seconds since the Unix epoch; null when not known")


class HolderRequest(BaseModel):
    """Which hold is meant."""

    model_config = ConfigDict(extra="forbid")

    holder: str = Field(
        "",
        max_length=128,
        description="As the answer to begin_hold named it; empty: the one of this token",
    )


class HoldRequest(HolderRequest):
    """For how long."""

    lease_s: float = Field(
        LEASE_S,
        ge=1,
        le=MAX_LEASE_S,
        allow_inf_nan=False,
        description="Seconds from now on; then training goes on by itself",
    )


class StepRequest(HolderRequest):
    """How far."""

    steps: int = Field(1, ge=1, le=MAX_STEPS, description="Updates to finish")
