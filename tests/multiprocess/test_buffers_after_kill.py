"""Parameters and buffers of an answer are of one boundary of one agreement, whoever restarts."""

import signal
import threading
from contextlib import suppress
from random import Random

import psutil
import pytest

from paramd.errors import ParamdError
from tests.sequences import changing
from tests.sequences.reading import LANES
from tests.sequences.session import CALL_S, NotNowError, Session, wait_for


def read(session: Session, lane: str, what: str) -> None:
    """All tensors by one lane, compared with the reference, whose buffers tell of every step."""
    found = session.ask(
        what,
        lambda: session.mesh.summon("*", buffers=True, transport=lane, timeout=CALL_S),  # type: ignore[arg-type]
    )
    session.judge(f"{what} by {lane}", found)


def held_and_stepped(session: Session, rng: Random) -> None:
    """An undo, a pause with two steps and reads of buffers within it."""
    for operation in (changing.edit, changing.undo):
        with suppress(NotNowError):
            operation(session, rng)
    session.held_at = session.mesh.pause(lease=2.0, timeout=CALL_S).step
    for lane in rng.sample(LANES, 2):
        session.held_at = session.mesh.step(1, timeout=CALL_S).step
        read(session, lane, "in the pause")


def written_back(session: Session) -> None:
    """A block of writing that changes nothing."""
    session.running()
    with session.mesh.writeback("one.weight", timeout=CALL_S):
        pass


def killed(session: Session, rng: Random) -> None:
    """The control plane is killed, and another one answers."""
    (control,) = session.helpers("control")
    session.struck()
    control.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
    wait_for(
        lambda: {one.pid for one in session.helpers("control")} - {control.pid},
        "a control plane",
        30,
    )


def killed_with_a_capture_under_way(session: Session, rng: Random) -> None:
    """As `killed`, while all ranks are ready for a capture that one of them cannot reach."""
    trainer = psutil.Process(session.ranks[1].process.pid)
    trainer.suspend()

    def ask() -> None:
        with suppress(ParamdError):
            session.mesh.summon("*", buffers=True, timeout=CALL_S)

    asking = threading.Thread(target=ask)
    try:
        asking.start()
        killed(session, rng)
    finally:
        trainer.resume()
    asking.join()


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_buffers_on_every_lane_are_of_the_parameters_step_right_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The session sets it: it has to be as before afterwards.
    monkeypatch.setenv("PARAMD_STATE_DIR", "")
    with Session("ddp") as session:
        for turn, point in enumerate(("running", "held", "capturing")):
            rng = Random(turn)
            held_and_stepped(session, rng)
            if point != "held":
                written_back(session)
            (killed_with_a_capture_under_way if point == "capturing" else killed)(session, rng)
            for lane in rng.sample(LANES, len(LANES)):
                read(session, lane, f"after a kill, {point}")
            session.running(perhaps=True)
