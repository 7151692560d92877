"""Documents of parameters and their numbers, as OpenAPI describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from paramd.layout.stats import STATISTICS

_PARAM = {
    "fqn": "layers.0.up.weight",
    "aliases": [],
    "dtype": "bfloat16",
    "shape": [4096, 1024],
    "numel": 4194304,
    "kind": "parameter",
    "placement": "Shard(0) over 2",
}


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class ParamDocument(BaseModel):
    """One full parameter or buffer."""

    fqn: str = Field(description="Name, as a user's state_dict has it")
    aliases: list[str] = Field(description="Further names of the same tensor")
    dtype: str = Field(description="torch dtype without its prefix")
    shape: list[int] = Field(description="Full, unsharded shape")
    numel: int
    kind: str = Field(description="parameter or buffer")
    placement: str = Field(description="How it is distributed, in words")


class MissingDocument(BaseModel):
    """A tensor that cannot be had now, and why."""

    name: str
    ranks: list[int] = Field(description="Ranks that alone hold a part of it and cannot give it")
    reason: str


class ParamPage(BaseModel):
    """A page of parameters, in the order of the module tree."""

    layout_digest: str
    total_count: int = Field(description="Tensors that match, on all pages")
    params: list[ParamDocument]
    next_page_token: str = Field(description="Ask with it for the next page; empty at the end")
    epoch: int = Field(description="Epoch of the statistics that were compared; -1 for none")
    step: int = Field(description="Step of them, the same on all pages; -1 for none")
    partial: bool = Field(description="Tensors are missing because ranks are")
    missing: list[MissingDocument]

    model_config = _example(
        layout_digest="5b1c",
        total_count=2,
        params=[_PARAM],
        next_page_token="MTo6NWIxYw==",
        epoch=-1,
        step=-1,
        partial=False,
        missing=[],
    )


class PieceDocument(BaseModel):
    """One region of a tensor that one rank holds."""

    rank: int
    region: str = Field(description="box (of the full tensor) or interval (of it flattened)")
    begin: list[int] = Field(description="First index of every dim, or the first element")
    end: list[int] = Field(description="One past the last")
    numel: int
    size_bytes: int


class ParamDetail(ParamDocument):
    """A tensor and who holds which part of it."""

    layout_digest: str
    piece_count: int
    pieces: list[PieceDocument] = Field(description="Ordered by rank; at most 4,096")


if TYPE_CHECKING:
    _Numbers = BaseModel
else:
    _Numbers = create_model(
        "_Numbers",
        name=(str, Field(description='Name it was found by, or "total"')),
        dtype=(str, ...),
        shape=(list[int], ...),
        count=(int, Field(description="Elements")),
        **{
            one.name: (
                int if one.kind is int else float | None,
                Field(description=one.about or None),
            )
            for one in sorted(STATISTICS, key=lambda one: one.kind is not int)
        },
    )


class StatsDocument(_Numbers):
    """Statistics of one full tensor; replicas count once. null: not a number."""

    exponents: list[list[int]] = Field(
        description="[e, count] of elements with 2**e <= |x| < 2**(e+1), rising; "
        "empty unless asked for"
    )


class StatsList(BaseModel):
    """Statistics of tensors, all at one step."""

    epoch: int
    step: int = Field(description="The step that all numbers belong to")
    stats: list[StatsDocument]
    total: StatsDocument = Field(
        description="Over all tensors that globs and facts chose and that are not missing"
    )
    partial: bool = Field(description="Tensors are missing because ranks are")
    missing: list[MissingDocument]


class HistogramDocument(BaseModel):
    """How many elements of one tensor lie where, at one step."""

    epoch: int
    step: int
    name: str
    edges: list[float] = Field(description="Rising; bin i is edges[i] <= x < edges[i+1]")
    counts: list[int] = Field(description="One less than edges")
    below_count: int = Field(description="Finite elements below the first edge")
    above_count: int = Field(description="Finite elements at or above the last edge")
    nan_count: int
    inf_count: int

    model_config = _example(
        epoch=3,
        step=1200,
        name="layers.0.up.weight",
        edges=[-1.0, 0.0, 1.0],
        counts=[2047, 2049],
        below_count=0,
        above_count=0,
        nan_count=0,
        inf_count=0,
    )


class HeatmapDocument(BaseModel):
    """A tensor as a picture: a matrix shrunk to cells, at one step."""

    epoch: int
    step: int
    name: str
    mode: str
    shape: list[int] = Field(description="Shape of what is shown: the tensor's, or the slice's")
    row_dims: int = Field(description="How many first dims count rows; the others count columns")
    row_count: int = Field(description="Rows of the matrix")
    col_count: int = Field(description="Columns of the matrix")
    cell_row_count: int = Field(
        description="Rows of the picture; row r of the matrix is in floor(r * this / row_count)"
    )
    cell_col_count: int
    values: list[float | None] = Field(
        description="Row-major, 7 digits; over the finite elements, null where there is none"
    )
    nonfinite: list[list[int]] = Field(
        description="[row, column, count] of cells with NaN or infinite elements"
    )

    model_config = _example(
        epoch=3,
        step=1200,
        name="layers.0.up.weight",
        mode="mean",
        shape=[2, 4],
        row_dims=1,
        row_count=2,
        col_count=4,
        cell_row_count=1,
        cell_col_count=2,
        values=[0.5, -0.25],
        nonfinite=[],
    )


class ValuesDocument(BaseModel):
    """Elements of one tensor or a slice of it, at one step."""

    epoch: int
    step: int
    name: str
    dtype: str
    begin: list[int] = Field(description="First index of every dim of the full tensor")
    shape: list[int]
    values: list[str] = Field(
        description='Row-major; digits that give exactly the element: "0.5", "nan", "-inf", '
        '"9007199254740993", "true", "1.0+2.0j"'
    )

    model_config = _example(
        epoch=3,
        step=1200,
        name="norm.weight",
        dtype="bfloat16",
        begin=[0],
        shape=[2],
        values=["1.0", "0.99609375"],
    )
