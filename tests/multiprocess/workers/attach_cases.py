"""One rank of small cases around attach; asserts, and says which it passed.

Runs with two ranks. Rank 0 is its own client where one is needed.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import paramd
from paramd import places
from paramd.errors import ConflictError, ParamdError
from paramd.memory.arena import HostArena
from paramd.memory.control_page import Word
from paramd.security.tickets import new_token
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.hold import AGREEMENT_LOST
from paramd.trainer.helpers.sidecar_link import SidecarLink
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.settings import AttachSettings
from tests.longer import sample
from tests.multiprocess import kinds
from tests.multiprocess.truth import assert_same_bytes
from tests.rank import Cases, run

case = CASES = Cases()


def built(kind: str = "ddp") -> tuple[kinds.Built, torch.optim.Optimizer]:
    made = kinds.named(kind).build()
    trainable = [p for p in made.model.parameters() if p.requires_grad]
    return made, torch.optim.SGD(trainable, lr=0.05)


def refused_everywhere(kind: str, text: str, attach: Callable[[], Any]) -> None:
    """Every rank gets the same kind of error, which says `text`; nothing is left."""
    dist.barrier()
    before = holdings()
    told: list[str] = [""] * dist.get_world_size()
    try:
        attach()
    except (ParamdError, _Planted) as error:
        mine = f"{type(error).__name__}: {error}"
    else:
        mine = "it attached"
    dist.all_gather_object(told, mine)
    assert mine.startswith(kind), mine
    assert all(text in line for line in told), told
    assert_nothing_new(before)


@case
def a_state_dir_that_is_no_directory_on_one_rank() -> None:
    made, optimizer = built()
    state_dir = os.environ["PARAMD_STATE_DIR"]
    if dist.get_rank() == 1:
        file = Path(state_dir, "file")
        file.touch()
        os.environ["PARAMD_STATE_DIR"] = str(file / "below")
    try:
        refused_everywhere(
            "UsageError",
            "set PARAMD_STATE_DIR",
            lambda: paramd.attach(made.model, optimizer, job="no-dir"),
        )
    finally:
        os.environ["PARAMD_STATE_DIR"] = state_dir


@case
def job_names_that_differ() -> None:
    made, optimizer = built()
    refused_everywhere(
        "UsageError", "the same on every rank",
        lambda: paramd.attach(made.model, optimizer, job=f"job-{dist.get_rank()}"),
    )  # fmt: skip


@case
def different_parameters_under_one_name() -> None:
    torch.manual_seed(dist.get_rank())
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    refused_everywhere(
        "UsageError", "'weight' is unsharded on ranks 0 and 1, but with diff",
        lambda: paramd.attach(other, optimizer, job="two-in-one"),
    )  # fmt: skip


@case
def an_optimizer_of_another_model_on_one_rank() -> None:
    (made, optimizer), (_, foreign) = built(), built()
    chosen = foreign if dist.get_rank() == 1 else optimizer
    refused_everywhere(
        "UsageError", "updates no parameter of this",
        lambda: paramd.attach(made.model, chosen, job="foreign"),
    )  # fmt: skip


PLANTED: list[tuple[type, str]] = [
    (SidecarLink, "open"), (HostArena, "populate"), (ParameterStorage, "move_in"),
    (Boundary, "__init__"), (Attachment, "__init__"), (Attachment, "_follow"),
    (SidecarLink, "serve"), (threading.Thread, "start"),
]  # fmt: skip
"""What attaching does, in order; each is made to raise once it has done its work."""


@case
def whatever_raises_on_one_rank_leaves_no_rank_attached() -> None:
    made, optimizer = built("fsdp2")
    train(made, optimizer)
    # A site that does not answer: no control plane of the job's own has to start each time.
    settings = AttachSettings(
        control="http://127.0.0.1:1", token=new_token(), control_timeout_s=0.0
    )
    for owner, name in sample(PLANTED, PLANTED[::2]):
        truth = kinds.full_parameters(made.model)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(owner, name, failing(getattr(owner, name)))
            refused_everywhere(
                "ConflictError" if dist.get_rank() == 0 else "_Planted",
                "planted",
                lambda: paramd.attach(made.model, optimizer, job="undone", settings=settings),
            )
        assert_same_bytes(kinds.full_parameters(made.model), truth)
        train(made, optimizer)
    attachment = paramd.attach(made.model, optimizer, job="undone")
    train(made, optimizer)
    summon_and_compare(made, "undone", attachment.step)
    attachment.detach()


class _Planted(AttributeError):
    """No error of ours, and none that fails open."""


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    def fails(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise _Planted("planted")

    return fails


@case
def a_forked_child_that_detaches_leaves_its_parents_service_alone() -> None:
    made, optimizer = built()
    attachment = paramd.attach(made.model, optimizer, job="forked")
    train(made, optimizer)
    sidecars = holdings()["child"]
    child = os.fork()
    if child == 0:
        os._exit(detached_in_a_child(made, attachment))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(made, optimizer)
    summon_and_compare(made, "forked", 2)
    assert holdings()["child"] == sidecars, "a sidecar was sent home"
    attachment.detach()


def detached_in_a_child(made: kinds.Built, attachment: Any) -> int:
    """0 when the child's parameters have their values in memory of its own."""
    try:
        before = [p.detach().clone() for p in made.model.parameters()]
        attachment.detach()
        inside = attachment._arena.address
        with torch.no_grad():
            same = all(map(torch.equal, before, made.model.parameters()))
            for parameter in made.model.parameters():
                parameter.fill_(7)
        left = all(
            not inside <= p.data_ptr() < inside + attachment._arena.size_bytes
            for p in made.model.parameters()
        )
        return 0 if same and left and attachment.step == 1 else 1
    except BaseException:
        traceback.print_exc()
        return 2


@case
def attached_twice() -> None:
    made, optimizer = built()
    with torch.inference_mode():
        attachment = paramd.attach(made.model, optimizer, job="twice")
    refused_everywhere(
        "ConflictError", "already attached",
        lambda: paramd.attach(made.model, optimizer, job="twice-other"),
    )  # fmt: skip
    other, other_optimizer = built()
    refused_everywhere(
        "ConflictError", "under another job name",
        lambda: paramd.attach(other.model, other_optimizer, job="twice"),
    )  # fmt: skip
    train(made, optimizer)
    assert attachment.step == 1
    summon_and_compare(made, "twice", 1)
    with torch.inference_mode():
        attachment.detach()
    train(made, optimizer)


@case
def updates_outside_an_optimizer_count_and_are_whole() -> None:
    for kind in ("fsdp2", "ddp"):
        made, _ = built(kind)
        attachment = paramd.attach(made.model, None, job=f"update-{kind}")
        for step in range(3):
            loss = made.loss(step)
            loss.backward()
            with attachment.update(), torch.no_grad():
                for parameter in made.model.parameters():
                    parameter.sub_(0.05 * parameter.grad if parameter.grad is not None else 0)
                    parameter.grad = None
        assert attachment.step == 3
        summon_and_compare(made, f"update-{kind}", 3)
        try:
            with attachment.update():
                raise ArithmeticError
        except ArithmeticError:
            pass
        refused_inside_an_update(f"update-{kind}")
        with attachment.update():
            pass
        summon_and_compare(made, f"update-{kind}", 4)
        attachment.detach()


@case
def detach_leaves_nothing_and_attach_again_is_the_next_incarnation() -> None:
    made, optimizer = built("fsdp2")
    train(made, optimizer)
    before = holdings()
    for incarnation in (1, 2):
        attachment = paramd.attach(made.model, optimizer, job="again")
        assert attachment.incarnation == incarnation, attachment
        for _ in range(2):
            train(made, optimizer)
        summon_and_compare(made, "again", attachment.step)
        attachment.detach()
        attachment.detach()
        assert "detached" in repr(attachment)
        del attachment
        assert_nothing_new(before)
        assert list(places.job_dir("again").glob("*.sock")) == [], "a socket is left"
        assert not (places.job_dir("again") / "endpoint.json").exists() or dist.get_rank()
        train(made, optimizer)


@case
def a_sidecar_that_cannot_start_costs_the_service_not_the_training() -> None:
    made, optimizer = built("fsdp2")
    before = holdings()
    if dist.get_rank() == 1:
        os.environ["PARAMD_SIDECAR_LISTEN"] = "192.0.2.1:0"  # not a loopback address: it refuses
    try:
        attachment = paramd.attach(made.model, optimizer, job="no-sidecar")
    finally:
        os.environ.pop("PARAMD_SIDECAR_LISTEN", None)
    for _ in range(3):
        train(made, optimizer)
    assert attachment.step == 3
    if dist.get_rank() == 0:
        with (
            paramd.connect(job="no-sidecar") as mesh,
            pytest.raises(ParamdError, match=r"rank 1|no sidecar"),
        ):
            mesh.summon("*", timeout=10)
    dist.barrier()
    attachment.detach()
    train(made, optimizer)
    assert_nothing_new(before)


@case
def a_rank_too_slow_for_the_agreement_ends_it_and_nothing_else() -> None:
    made, optimizer = built("fsdp2")
    settings = AttachSettings(agreement_timeout_s=0.5, listen="127.0.0.1:0")
    attachment = paramd.attach(made.model, optimizer, job="slow", settings=settings)
    if dist.get_rank() == 1:
        time.sleep(1.5)
    for _ in range(4):
        with attachment.update():
            pass
    if dist.get_rank() == 0:
        assert attachment._page[Word.AGREEMENT_STATE] == AGREEMENT_LOST
    for _ in range(3):
        train(made, optimizer)
    assert attachment.step == 7
    summon_and_compare(made, "slow", 7)
    if dist.get_rank() == 0:
        with (
            paramd.connect(job="slow") as mesh,
            # On the thread that trains it would be refused as a call that waits for itself.
            ThreadPoolExecutor(1) as other,
        ):
            mesh.add_destination("here", os.environ["PARAMD_STATE_DIR"])
            reads: list[Callable[[], object]] = [
                lambda: mesh.summon("*", buffers=True),
                lambda: mesh.export("here/given-up").wait(),
            ]
            for read in reads:
                began_s = time.monotonic()
                with pytest.raises(ConflictError, match=r"ranks? \d+(, \d+)*:? .*gave up agreeing"):
                    other.submit(read).result()
                assert time.monotonic() - began_s < 40, "it waited for its time to be over"
    dist.barrier()
    attachment.detach()
    train(made, optimizer)


@case
def a_rank_that_does_not_attach_is_named() -> None:
    made, optimizer = built()
    dist.barrier()
    if dist.get_rank() == 0:
        settings = AttachSettings(attach_timeout_s=1.0, listen="127.0.0.1:0")
        with pytest.raises(ConflictError, match="rank 1 of 2 has not called"):
            paramd.attach(made.model, optimizer, job="missing", settings=settings)


def train(made: kinds.Built, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    made.loss(0).backward()
    optimizer.step()


def summon_and_compare(made: kinds.Built, job: str, step: int) -> None:
    """Rank 0 summons what torch gathers here, while all ranks stand."""
    truth = kinds.full_parameters(made.model)
    if dist.get_rank() == 0:
        with paramd.connect(job=job) as mesh:
            found = mesh.summon("*")
        assert found.step == step, (found.step, step)
        assert_same_bytes(found, truth)
    dist.barrier()


def refused_inside_an_update(job: str) -> None:
    if dist.get_rank() == 0:
        # Nobody asked for this before, so no snapshot of the step before is left of it.
        with paramd.connect(job=job) as mesh, pytest.raises(ParamdError, match="inside an update"):
            mesh.summon("*bias[1:]", timeout=1)
    dist.barrier()


def holdings() -> dict[str, set[str]]:
    """What this process holds: descriptors, maps of memory files, threads, children."""
    gc.collect()
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the listing's own
    maps = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:" in line or "/dev/shm" in line
    }
    threads = {t.name for t in threading.enumerate() if t.name.startswith(("paramd", "asyncio"))}
    children = {str(p.pid) for p in psutil.Process().children(recursive=True)}
    return {"fd": descriptors, "map": maps, "thread": threads, "child": children}


def assert_nothing_new(before: dict[str, set[str]]) -> None:
    """gloo closes a group's sockets on threads of its own, so this waits for them."""
    deadline_s = time.monotonic() + 60
    while True:
        now = holdings()
        new = {what: now[what] - before[what] for what in now}
        # Sockets of gloo's pairs change with every group; their number must not grow.
        grown = len(now["fd"]) - len(before["fd"])
        files = {text for text in new["fd"] if "socket:" not in text and "eventpoll" not in text}
        if not (files or new["map"] or new["thread"] or new["child"] or grown > 0):
            return
        assert time.monotonic() < deadline_s, (new, grown)
        time.sleep(0.05)


def main(names: list[str]) -> None:
    case.run(names)


if __name__ == "__main__":
    run(main)
