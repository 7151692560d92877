"""A user's script, for the type checker alone: `make verify` reads it, nothing runs it.

Each `type: ignore` stands where a mistake has to be an error: mypy reports those that ignore
nothing.
"""

import paramd


def halved(mesh: paramd.Mesh, name: str) -> paramd.Edit:
    """A function of theirs, with the types that they see printed."""
    norm: float = mesh[name].norm()
    shape: tuple[int, ...] = mesh[name].shape
    count: int = mesh[name].numel
    assert norm > 0
    assert len(shape) <= count
    return mesh[name].edit(mul=0.5)


def largest(mesh: paramd.Mesh) -> paramd.TensorStats:
    table: paramd.StatsTable = mesh.stats("*")
    row = max(table, key=lambda row: row.norm)
    print(row.nrom)  # type: ignore[attr-defined]
    return row


async def asked(mesh: paramd.AsyncMesh) -> paramd.Summoned:
    """The same, for asyncio."""
    groups: paramd.HyperparameterGroups = await mesh.hyperparameters()
    assert groups[0]["lr"] > 0
    return await mesh.summon("*")


def mistaken(mesh: paramd.Mesh, value: object) -> None:
    """What is no name is an error before anything runs."""
    print(paramd.Edits.nothing)  # type: ignore[attr-defined]
    print(paramd.Eidt)  # type: ignore[attr-defined]
    paramd.aconnect()  # type: ignore[attr-defined]
    mesh.keys()  # type: ignore[attr-defined]
    mesh.summmon("*")  # type: ignore[attr-defined]
    mesh["head.weight"] = value  # type: ignore[index]
    mesh["head.weight"].mean()  # type: ignore[attr-defined]
    try:
        mesh.undo()
    except paramd.ConflictError as error:
        print(error)
