"""The planted bugs: what is changed where, and which tests are to find it.

`old` stands exactly once in its file, so that code which moves breaks its bug loudly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CLIENT = "client/paramd/"
SERVICE = "service/paramd_service/"
SIDECAR = "service/paramd_service/sidecar/"
CONTROL = "service/paramd_service/control/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One bug; `name` says what the code does wrongly then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Below `tests/`; at least one of them must fail."""


def planted(file: str, *tests: str) -> Callable[[str, str, str], Bug]:
    """What makes the bugs of one file, given name, `old` and `new`."""
    return lambda name, old, new: Bug(name=name, file=file, old=old, new=new, tests=tests)


BOUNDARY = planted(CLIENT + "trainer/boundary/boundary.py", "unit/trainer/test_boundary.py")
BOUNDARIES = planted(SIDECAR + "boundaries.py", "integration/test_sidecar_pins.py")
GRADIENTS = planted(
    CLIENT + "trainer/boundary/gradients.py", "unit/trainer/test_gradient_capture.py"
)
GATE = planted(
    CLIENT + "memory/gate.py",
    "unit/memory/test_gate.py",
    "unit/trainer/test_boundary.py",
    "unit/trainer/test_editing.py",
)
GLANCE = planted(CLIENT + "trainer/home/glance.py", "unit/trainer/test_glance.py")
WATCH = planted(CLIENT + "trainer/home/watch.py", "unit/trainer/test_glance.py")
AGREEMENT = planted(CLIENT + "trainer/boundary/agreement.py", "unit/trainer/test_agreement.py")
HOLD = planted(
    CLIENT + "trainer/boundary/hold.py",
    "unit/trainer/test_acting.py",
    "unit/trainer/test_holding.py",
)
EDITS = planted(CLIENT + "trainer/boundary/edits.py", "unit/trainer/test_editing.py")
MERGE = planted(CLIENT + "layout/merge.py", "unit/layout/test_merge.py")
PLAN = planted(CLIENT + "layout/plan.py", "unit/layout/test_plan.py", "unit/layout/test_stats.py")
SIDECARS = planted(CLIENT + "mesh/peers/sidecars.py", "unit/mesh/test_pin.py")
STREAM = planted(CLIENT + "mesh/reading/stream.py", "unit/mesh/test_read.py")
TICKETS = planted(CLIENT + "security/tickets.py", "unit/test_tickets.py")
ORDERS = planted(SIDECAR + "orders.py", "unit/test_tickets.py", "integration/test_identity.py")
CALLS = planted(
    SIDECAR + "calls.py", "unit/sidecar/test_sidecar_parts.py", "integration/test_identity.py"
)
OWNER = planted(SIDECAR + "owner.py", "unit/sidecar/test_sidecar_parts.py")
PARTS = planted(SIDECAR + "parts.py", "integration/test_sidecar_admission.py")
ADMISSION = planted("service/paramd_service/admission.py", "integration/test_bounds.py")
UNIX_SERVER = planted(SIDECAR + "rpc/unix_server.py", "integration/test_auth_grpc.py")
SNAPSHOTS = planted(SIDECAR + "snapshots/store.py", "unit/sidecar/test_sidecar_snapshots.py")
EDIT_ENTRY = planted("service/paramd_service/edits/entry.py", "unit/sidecar/test_edits.py")
EDIT_DATA = planted("service/paramd_service/edits/receive.py", "unit/sidecar/test_edits.py")
PAGE_REQUESTS = planted(SIDECAR + "copying/page_requests.py", "unit/trainer/test_agreement.py")
AIO = planted("service/paramd_service/aio.py", "unit/test_aio.py")
JOIN = planted(
    CONTROL + "access/join.py",
    "unit/control/test_revocations.py",
    "unit/control/test_auth_guard.py",
    "unit/control/test_control_http.py",
    "integration/test_revocation.py",
)
DOORWAY = planted(CONTROL + "access/doorway.py", "unit/control/test_session.py")
COORDINATOR = planted(CONTROL + "mesh/coordinator.py", "unit/control/test_control_coordinator.py")
EDIT_MACHINE = planted(
    SERVICE + "edits/machine.py", "unit/control/test_edits_machine.py", "model/test_edit_machine.py"
)
EDIT_SERVICE = planted(SERVICE + "edits/service.py", "integration/test_edits_control.py")
ROLES = planted(CONTROL + "access/roles.py", "unit/control/test_auth_roles.py")
DIRECTORY = planted(
    "service/paramd_service/destinations/directory.py",
    "unit/exports/test_destinations.py",
    "unit/exports/test_others_exports.py",
    "integration/test_export_files.py",
)
MEGATRON = planted(CLIENT + "integrations/megatron.py", "unit/test_partitioned.py")

BUGS = (
    GATE(
        "the gate is not looked at after a copy",
        """        settling = settling_of(words, moment, rests=proof is Word.REST)
        if words[proof] != value:
            return CopyEnd.OVERTAKEN, state
""",
        """        settling = settling_of(words, moment, rests=proof is Word.REST)
""",
    ),
    GATE(
        "a copy begins inside an update",
        """    if seq & 1:
        return CopyEnd.UPDATING, state_of(page)
""",
        "",
    ),
    GATE(
        "a state is settled when the update ends",
        "        words[_REST] = self._rests\n",
        "        words[_REST] = self._rests\n        words[_SEQ] += 1\n",
    ),
    GATE(
        "SEQ is even before STEP is written",
        "        words[_STEP], words[_ITERATION] = step, iteration\n",
        "        words[_SEQ] += words[_SEQ] & 1\n"
        "        words[_STEP], words[_ITERATION] = step, iteration\n",
    ),
    GATE(
        "parameters that were not found right are settled",
        "if proven and words[_SEQ] & 1:",
        "if words[_SEQ] & 1:",
    ),
    GATE(
        "what rests changes during a copy",
        "if end is CopyEnd.DONE and digest() != before:",
        "if False:",
    ),
    GATE(
        "an edit is not counted",
        """        words[_EDITS] += 1
        words[_SEQ] += 1
""",
        """        words[_SEQ] += 1
""",
    ),
    GLANCE(
        "tensors whose `.data` was replaced seem unchanged at a glance",
        "            and take(self._inner).tobytes() == self._inner_words\n",
        "",
    ),
    BOUNDARY(
        "a state that the script changed late settles as its update left it",
        "note_settled(self._page, moment, changed=digest != left)",
        "note_settled(self._page, moment, changed=False)",
    ),
    BOUNDARY(
        "buffers that a forward has changed are copied as those of the step before",
        "self._acting.buffers_fit = keeps or not (self._ran_ahead and self._meets_forwards)",
        "self._acting.buffers_fit = True",
    ),
    BOUNDARIES(
        "a snapshot that somebody was told the boundary of is filled at another one",
        " or snapshot.tainted or snapshot.shown:",
        " or snapshot.tainted:",
    ),
    GRADIENTS(
        "a parameter transposed in its memory shows its gradient as the memory has it",
        "if found is not None and (offset is None or not _is_home(shard, found[shard.fqn])):",
        "if found is not None and offset is None:",
    ),
    WATCH(
        "a parameter in another's place and memory is not watched",
        "if glance is not None and all(map(is_, map(getitem, owners, keys), glance.tensors)):",
        "if glance is not None:",
    ),
    AGREEMENT("ranks one iteration apart agree", " and in_step\n", "\n"),
    AGREEMENT(
        "a quiet training may not hear a request for thousands of steps",
        "longest = min(QUIET_BOUNDARIES, ",
        "longest = max(QUIET_BOUNDARIES, ",
    ),
    AGREEMENT(
        "equal numbers of two control planes are agreed", " and token == -minus_token and", " and"
    ),
    AGREEMENT(
        "a rank that was never asked is pulled along",
        "same = number == -minus_number and",
        "same =",
    ),
    AGREEMENT(
        "a request that is taken back meanwhile stays promised",
        """    if words[Word.READY] != number or words[Word.TOKEN] != request.token:
        words[Word.PROMISED] = 0
        return NOTHING
""",
        "",
    ),
    AGREEMENT(
        "a request is agreed twice", "if not same or number <= self._last_agreed:", "if not same:"
    ),
    AGREEMENT(
        "a promised edit is given up as early as anything else",
        "self._edit_timeout_s if self._request.action == EDIT else self._timeout_s",
        "self._timeout_s",
    ),
    HOLD(
        "a client does not bring frequent rounds back",
        "quiet=words[Word.CLIENTS_UNTIL_NS] < now_ns,",
        "quiet=True,",
    ),
    HOLD("a hold outlives its lease", "return self._clock_ns() < until_ns", "return True"),
    EDITS(
        "an edit is applied twice on one rank",
        "            self._run(preparation.steps)\n",
        "            self._run(preparation.steps)\n            self._run(preparation.steps)\n",
    ),
    EDITS(
        "an edit that failed half way is served",
        """            self.failed = True
            words[Word.EDIT_FAILED] = request.number
            raise
""",
        """            words[Word.EDIT_FAILED] = request.number
""",
    ),
    MERGE("ranks that tie different tensors are accepted", "if known != fqn:", "if False:"),
    MERGE(
        "the layout's digest does not tell whether it is mirrored",
        "if layout.mirrored:\n        digest",
        "if False:\n        digest",
    ),
    PLAN(
        "a replica counts twice",
        "found.setdefault(piece.region, []).append(piece)",
        "found.setdefault((piece.region, piece.rank), []).append(piece)",
    ),
    SIDECARS(
        "states with different edits are one state",
        "found = {(pin.state, pin.boundary_token) for pin in pins}",
        "found = {(pin.state._replace(edits=0), pin.boundary_token) for pin in pins}",
    ),
    SIDECARS(
        "ranks before and after a late change are one state",
        "if len(found) != 1 or not _settled_alike(pins):",
        "if len(found) != 1:",
    ),
    STREAM(
        "another step's bytes are read",
        "if sent != expected:",
        "if sent.incarnation != expected.incarnation:",
    ),
    STREAM("checksums are not compared", "        chunk.check()\n", ""),
    STREAM(
        "a gap in a stream is not seen", "if offset_bytes != self.offset_bytes or end", "if end"
    ),
    TICKETS("an expired ticket is good", "if late_s > CLOCK_SKEW_S:", "if False:"),
    TICKETS(
        "a ticket of another incarnation is good",
        "if claims.incarnation != incarnation:",
        "if False:",
    ),
    TICKETS(
        "a ticket shown with another server's key is good",
        "if not (_fits(proof, self._place, claims.keys)",
        "if not (bool(proof)",
    ),
    TICKETS(
        "a ticket without keys is good",
        "if role in OF_RANKS else keys is not None",
        "if role in OF_RANKS else True",
    ),
    TICKETS(
        "the signature is not looked at",
        "self._jws.decode(ticket, self._key, [_ALGORITHM])",
        "pass",
    ),
    ORDERS("an order of the control plane is taken again", "number in self._taken:", "False:"),
    CALLS(
        "an order of the control plane is good for another request",
        "if order is not None and order.digest != CALLER.get().told:",
        "if False:",
    ),
    CALLS(
        "two authorization values are as good as one",
        "if len(values) == 1 and isinstance",
        "if values and isinstance",
    ),
    OWNER(
        "a stale incarnation takes a sidecar over",
        "if stale or (request.incarnation == owner.incarnation and not same):",
        "if False:",
    ),
    OWNER(
        "a trainer that died inside an update left whole parameters",
        "torn = inside or words",
        "torn = words",
    ),
    PARTS(
        "a plan of another incarnation is served",
        "if incarnation != self.incarnation or layout_digest != mesh.layout_digest:",
        "if layout_digest != mesh.layout_digest:",
    ),
    UNIX_SERVER(
        "a viewer maps snapshots",
        "check_role(self.caller(message), GATHERERS)\n        snapshot_id",
        "self.caller(message)\n        snapshot_id",
    ),
    ADMISSION(
        "a request's parts are not counted before they are parsed",
        "MAX_PARTS: Final = 1 << 17",
        "MAX_PARTS: Final = 1 << 30",
    ),
    SNAPSHOTS(
        "a snapshot outlives its lease",
        "if lease is None or lease.expires_ns <= self._clock_ns():",
        "if lease is None:",
    ),
    SNAPSHOTS(
        "memory that a client has mapped is used again",
        "if self._closed or snapshot.tainted or snapshot.map_count or block.lost:",
        "if self._closed or snapshot.tainted or block.lost:",
    ),
    EDIT_ENTRY(
        "an undo swaps ranges of equal shape",
        "    undoing = (_undoing(one, reset_moments) for one in records)\n",
        "    twins = {}\n"
        "    for one in records:\n"
        "        twins.setdefault(one.sizes, []).append(one)\n"
        "    undoing = [\n"
        "        replace(\n"
        "            _undoing(one, reset_moments), arena_begin=twins[one.sizes].pop().arena_begin\n"
        "        )\n"
        "        for one in records\n"
        "    ]\n",
    ),
    EDIT_ENTRY("an edit in doubt never happened", " or promised == number:", ":"),
    EDIT_ENTRY(
        "what a rank has promised is read last",
        "or promised == number:",
        "or words[Word.PROMISED] == number:",
    ),
    EDIT_DATA(
        "NaN is taken as data",
        "if not self._allow_nonfinite and not is_finite(block, part.dtype):",
        "if False:",
    ),
    PAGE_REQUESTS(
        "READY stands before TOKEN",
        "        words[Word.READY] = 0\n        words[Word.TOKEN] = boundary.token\n",
        "        words[Word.READY] = number\n        words[Word.TOKEN] = boundary.token\n",
    ),
    AIO(
        "a cancelled call lets go of what its thread uses",
        "while not running.done():",
        "while False:",
    ),
    JOIN(
        "gRPC of the control plane ignores revocations", "        self.check_revoked(claims)\n", ""
    ),
    JOIN(
        "the limiter's burst is not capped",
        "left = min(self.burst, left + (now_s - seen_s) * self.per_s)",
        "left = left + (now_s - seen_s) * self.per_s",
    ),
    DOORWAY(
        "a malformed Authorization falls back to the session",
        'if _values(scope, b"authorization"):\n            return',
        "if bearer_of(scope):\n            return",
    ),
    COORDINATOR(
        "one caller's conflict ends the round of all",
        "if len(self._current) > 1 and _refused(self._round):",
        "if False:",
    ),
    COORDINATOR(
        "boundary numbers are lowered",
        "self._last_boundary = max(self._last_boundary, number)",
        "self._last_boundary = number",
    ),
    COORDINATOR("ranks at different steps are one capture", "if len(steps) > 1:", "if False:"),
    COORDINATOR("an answer of another incarnation counts", "if foreign:", "if False:"),
    EDIT_MACHINE(
        "an edit is APPLIED when the first rank says so",
        "        if len(self._applied) < self.world_size:\n            return []\n",
        "",
    ),
    EDIT_SERVICE(
        "an editor commits another's edit",
        "if by.name != row.actor and not by.may(Action.EDIT_ANY):",
        "if False:",
    ),
    ROLES(
        "statistics of a slice are a viewer's",
        'return Action.READ if needed is Action.VIEW and "[" in query else needed',
        "return needed",
    ),
    DIRECTORY(
        "an export appears before all of it is there",
        "        with explained(self._target), self._parent(make=True) as parent:\n",
        "        self._hidden = self._last\n"
        "        with explained(self._target), self._parent(make=True) as parent:\n",
    ),
    DIRECTORY(
        "an export of another job that comes meanwhile is replaced",
        "                self._check_replaceable(parent, self._hidden)\n",
        "                pass\n",
    ),
    DIRECTORY(
        "an export follows symbolic links",
        "DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC",
    ),
    MEGATRON(
        "every rank's slice of a parameter is taken for the first one's",
        "first = rank * prod(shape) if split == 0 else 0",
        "first = 0",
    ),
)
