"""The planted bugs: what is changed where, and which tests are to find it.

`old` stands exactly once in its file, so that code which moves breaks its bug loudly.
"""

from __future__ import annotations

from dataclasses import dataclass

CLIENT = "client/paramd/"
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


BUGS = (
    Bug(
        name="the gate is not looked at after a copy",
        file=CLIENT + "memory/gate.py",
        old="""        at_point("copy-moved")
        if words[proof] != value:
            return CopyEnd.OVERTAKEN, state
""",
        new="""        at_point("copy-moved")
""",
        tests=("unit/memory/test_gate.py",),
    ),
    Bug(
        name="a copy begins inside an update",
        file=CLIENT + "memory/gate.py",
        old="""    if seq & 1:
        return CopyEnd.UPDATING, state_of(page)
""",
        new="",
        tests=("unit/memory/test_gate.py",),
    ),
    Bug(
        name="a state is settled when the update ends",
        file=CLIENT + "memory/gate.py",
        old="        words[_REST] = self._rests\n",
        new="        words[_REST] = self._rests\n        words[_SEQ] += 1\n",
        tests=("unit/memory/test_gate.py", "unit/trainer/test_boundary.py"),
    ),
    Bug(
        name="SEQ is even before STEP is written",
        file=CLIENT + "memory/gate.py",
        old="        words[_STEP], words[_ITERATION] = step, iteration\n",
        new="        words[_SEQ] += words[_SEQ] & 1\n"
        "        words[_STEP], words[_ITERATION] = step, iteration\n",
        tests=("unit/memory/test_gate.py",),
    ),
    Bug(
        name="parameters that were not found right are settled",
        file=CLIENT + "memory/gate.py",
        old="        if proven and words[_SEQ] & 1:\n",
        new="        if words[_SEQ] & 1:\n",
        tests=("unit/memory/test_gate.py", "unit/trainer/test_boundary.py"),
    ),
    Bug(
        name="what rests changes during a copy",
        file=CLIENT + "memory/gate.py",
        old="    if end is CopyEnd.DONE and digest() != before:\n",
        new="    if False:\n",
        tests=("unit/memory/test_gate.py", "unit/trainer/test_boundary.py"),
    ),
    Bug(
        name="tensors whose `.data` was replaced seem unchanged at a glance",
        file=CLIENT + "trainer/home/watch.py",
        old="            and take(self._inner).tobytes() == self._inner_words\n",
        new="",
        tests=("unit/trainer/test_glance.py",),
    ),
    Bug(
        name="a parameter in another's place and memory is not watched",
        file=CLIENT + "trainer/home/watch.py",
        old="if glance is not None and all(map(is_, map(getitem, owners, keys), glance.tensors)):",
        new="if glance is not None:",
        tests=("unit/trainer/test_glance.py",),
    ),
    Bug(
        name="ranks one iteration apart agree",
        file=CLIENT + "trainer/boundary/agreement.py",
        old=" and lowest == -minus_highest\n",
        new="\n",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="an edit is not counted",
        file=CLIENT + "memory/gate.py",
        old="""        words[_EDITS] += 1
        words[_SEQ] += 1
""",
        new="""        words[_SEQ] += 1
""",
        tests=("unit/memory/test_gate.py", "unit/trainer/test_editing.py"),
    ),
    Bug(
        name="a client does not bring frequent rounds back",
        file=CLIENT + "trainer/boundary/hold.py",
        old="quiet=words[Word.CLIENTS_UNTIL_NS] < now_ns,",
        new="quiet=True,",
        tests=("unit/trainer/test_acting.py",),
    ),
    Bug(
        name="a quiet training may not hear a request for thousands of steps",
        file=CLIENT + "trainer/boundary/agreement.py",
        old="longest = min(QUIET_BOUNDARIES, ",
        new="longest = max(QUIET_BOUNDARIES, ",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="equal numbers of two control planes are agreed",
        file=CLIENT + "trainer/boundary/agreement.py",
        old=" and token == -minus_token and",
        new=" and",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="a rank that was never asked is pulled along",
        file=CLIENT + "trainer/boundary/agreement.py",
        old="same = number == -minus_number and",
        new="same =",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="a request that is taken back meanwhile stays promised",
        file=CLIENT + "trainer/boundary/agreement.py",
        old="""    if words[Word.READY] != number or words[Word.TOKEN] != request.token:
        words[Word.PROMISED] = 0
        return NOTHING
""",
        new="",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="a request is agreed twice",
        file=CLIENT + "trainer/boundary/agreement.py",
        old="if not same or number <= self._last_agreed:",
        new="if not same:",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="a promised edit is given up as early as anything else",
        file=CLIENT + "trainer/boundary/agreement.py",
        old="self._edit_timeout_s if self._request.action == EDIT else self._timeout_s",
        new="self._timeout_s",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="an edit is applied twice on one rank",
        file=CLIENT + "trainer/boundary/edits.py",
        old="            self._run(preparation.steps)\n",
        new="            self._run(preparation.steps)\n            self._run(preparation.steps)\n",
        tests=("unit/trainer/test_editing.py",),
    ),
    Bug(
        name="an edit that failed half way is served",
        file=CLIENT + "trainer/boundary/edits.py",
        old="""            self.failed = True
            words[Word.EDIT_FAILED] = request.number
            raise
""",
        new="""            words[Word.EDIT_FAILED] = request.number
""",
        tests=("unit/trainer/test_editing.py",),
    ),
    Bug(
        name="a hold outlives its lease",
        file=CLIENT + "trainer/boundary/hold.py",
        old="return self._clock_ns() < until_ns",
        new="return True",
        tests=("unit/trainer/test_holding.py",),
    ),
    Bug(
        name="ranks that tie different tensors are accepted",
        file=CLIENT + "layout/merge.py",
        old="                if known != fqn:\n",
        new="                if False:\n",
        tests=("unit/layout/test_merge.py",),
    ),
    Bug(
        name="the layout's digest does not tell whether it is mirrored",
        file=CLIENT + "layout/merge.py",
        old="    if layout.mirrored:\n        digest",
        new="    if False:\n        digest",
        tests=("unit/layout/test_merge.py",),
    ),
    Bug(
        name="a replica counts twice",
        file=CLIENT + "layout/plan.py",
        old="found.setdefault(piece.region, []).append(piece)",
        new="found.setdefault((piece.region, piece.rank), []).append(piece)",
        tests=("unit/layout/test_plan.py", "unit/layout/test_stats.py"),
    ),
    Bug(
        name="states with different edits are one state",
        file=CLIENT + "mesh/peers/sidecars.py",
        old="found = {pin.state for pin in pins}",
        new="found = {pin.state._replace(edits=0) for pin in pins}",
        tests=("unit/mesh/test_pin.py",),
    ),
    Bug(
        name="another step's bytes are read",
        file=CLIENT + "mesh/reading/stream.py",
        old="if sent != expected:",
        new="if sent.incarnation != expected.incarnation:",
        tests=("unit/mesh/test_read.py",),
    ),
    Bug(
        name="checksums are not compared",
        file=CLIENT + "mesh/reading/stream.py",
        old="        chunk.check()\n",
        new="",
        tests=("unit/mesh/test_read.py",),
    ),
    Bug(
        name="a gap in a stream is not seen",
        file=CLIENT + "mesh/reading/stream.py",
        old="if offset_bytes != self.offset_bytes or end",
        new="if end",
        tests=("unit/mesh/test_read.py",),
    ),
    Bug(
        name="an expired ticket is good",
        file=CLIENT + "security/tickets.py",
        old="        if late_s > CLOCK_SKEW_S:\n",
        new="        if False:\n",
        tests=("unit/test_tickets.py",),
    ),
    Bug(
        name="a ticket of another incarnation is good",
        file=CLIENT + "security/tickets.py",
        old="        if claims.incarnation != incarnation:\n",
        new="        if False:\n",
        tests=("unit/test_tickets.py",),
    ),
    Bug(
        name="a ticket shown with another server's key is good",
        file=CLIENT + "security/tickets.py",
        old="        if not (_fits(proof, self._place, claims.keys)",
        new="        if not (bool(proof)",
        tests=("unit/test_tickets.py",),
    ),
    Bug(
        name="a ticket without keys is good",
        file=CLIENT + "security/tickets.py",
        old=" if role in OF_RANKS else keys is not None\n",
        new=" if role in OF_RANKS else True\n",
        tests=("unit/test_tickets.py",),
    ),
    Bug(
        name="an order of the control plane is taken again",
        file=SIDECAR + "orders.py",
        old="number in self._taken:",
        new="False:",
        tests=("unit/test_tickets.py", "integration/test_identity.py"),
    ),
    Bug(
        name="an order of the control plane is good for another request",
        file=SIDECAR + "rpc/auth.py",
        old="if order is not None and order.digest != CALLER.get().told:",
        new="if False:",
        tests=("integration/test_identity.py",),
    ),
    Bug(
        name="a request's parts are not counted before they are parsed",
        file="service/paramd_service/admission.py",
        old="MAX_PARTS: Final = 1 << 17\n",
        new="MAX_PARTS: Final = 1 << 30\n",
        tests=("integration/test_bounds.py",),
    ),
    Bug(
        name="the signature is not looked at",
        file=CLIENT + "security/tickets.py",
        old="            self._jws.decode(ticket, self._key, [_ALGORITHM])\n",
        new="            pass\n",
        tests=("unit/test_tickets.py",),
    ),
    Bug(
        name="a stale incarnation takes a sidecar over",
        file=SIDECAR + "owner.py",
        old="    if stale or (request.incarnation == owner.incarnation and not same):\n",
        new="    if False:\n",
        tests=("unit/sidecar/test_sidecar_parts.py",),
    ),
    Bug(
        name="a plan of another incarnation is served",
        file=SIDECAR + "rank.py",
        old="if incarnation != self.incarnation or layout_digest != mesh.layout_digest:",
        new="if layout_digest != mesh.layout_digest:",
        tests=("integration/test_sidecar_admission.py",),
    ),
    Bug(
        name="a trainer that died inside an update left whole parameters",
        file=SIDECAR + "owner.py",
        old="torn = inside or words",
        new="torn = words",
        tests=("unit/sidecar/test_sidecar_parts.py",),
    ),
    Bug(
        name="two authorization values are as good as one",
        file=SIDECAR + "rpc/auth.py",
        old="if len(values) == 1 and isinstance",
        new="if values and isinstance",
        tests=("unit/sidecar/test_sidecar_parts.py",),
    ),
    Bug(
        name="a viewer maps snapshots",
        file=SIDECAR + "rpc/unix_server.py",
        old="        check_role(self._caller(message), GATHERERS)\n        snapshot_id",
        new="        self._caller(message)\n        snapshot_id",
        tests=("integration/test_auth_grpc.py",),
    ),
    Bug(
        name="a snapshot outlives its lease",
        file=SIDECAR + "snapshots/store.py",
        old="if lease is None or lease.expires_ns <= self._clock_ns():",
        new="if lease is None:",
        tests=("unit/sidecar/test_sidecar_snapshots.py",),
    ),
    Bug(
        name="memory that a client has mapped is used again",
        file=SIDECAR + "snapshots/store.py",
        old="if self._closed or snapshot.tainted or snapshot.map_count or block.lost:",
        new="if self._closed or snapshot.tainted or block.lost:",
        tests=("unit/sidecar/test_sidecar_snapshots.py",),
    ),
    Bug(
        name="an undo swaps ranges of equal shape",
        file=SIDECAR + "edits/entry.py",
        old="    undoing = (_undoing(one, reset_moments) for one in records)\n",
        new="    twins = {}\n"
        "    for one in records:\n"
        "        twins.setdefault(one.sizes, []).append(one)\n"
        "    undoing = [\n"
        "        replace(\n"
        "            _undoing(one, reset_moments), arena_begin=twins[one.sizes].pop().arena_begin\n"
        "        )\n"
        "        for one in records\n"
        "    ]\n",
        tests=("unit/sidecar/test_edits.py",),
    ),
    Bug(
        name="NaN is taken as data",
        file=SIDECAR + "edits/receive.py",
        old="if not self._allow_nonfinite and not is_finite(block, part.dtype):",
        new="if False:",
        tests=("unit/sidecar/test_edits.py",),
    ),
    Bug(
        name="an edit in doubt never happened",
        file=SIDECAR + "edits/entry.py",
        old=" or promised == number:\n",
        new=":\n",
        tests=("unit/sidecar/test_edits.py",),
    ),
    Bug(
        name="what a rank has promised is read last",
        file=SIDECAR + "edits/entry.py",
        old=" or promised == number:\n",
        new=" or words[Word.PROMISED] == number:\n",
        tests=("unit/sidecar/test_edits.py",),
    ),
    Bug(
        name="READY stands before TOKEN",
        file=SIDECAR + "copying/page_requests.py",
        old="        words[Word.READY] = 0\n        words[Word.TOKEN] = boundary.token\n",
        new="        words[Word.READY] = number\n        words[Word.TOKEN] = boundary.token\n",
        tests=("unit/trainer/test_agreement.py",),
    ),
    Bug(
        name="a cancelled call lets go of what its thread uses",
        file="service/paramd_service/aio.py",
        old="        while not running.done():\n",
        new="        while False:\n",
        tests=("unit/test_aio.py",),
    ),
    Bug(
        name="gRPC of the control plane ignores revocations",
        file=CONTROL + "access/join.py",
        old="        self.check_revoked(claims)\n",
        new="",
        tests=("unit/control/test_revocations.py", "integration/test_revocation.py"),
    ),
    Bug(
        name="the limiter's burst is not capped",
        file=CONTROL + "access/join.py",
        old="left = min(self.burst, left + (now_s - seen_s) * self.per_s)",
        new="left = left + (now_s - seen_s) * self.per_s",
        tests=("unit/control/test_auth_guard.py", "unit/control/test_control_http.py"),
    ),
    Bug(
        name="a malformed Authorization falls back to the session",
        file=CONTROL + "access/doorway.py",
        old="""        if _values(scope, b"authorization"):
            return""",
        new="""        if bearer_of(scope):
            return""",
        tests=("unit/control/test_session.py",),
    ),
    Bug(
        name="one caller's conflict ends the round of all",
        file=CONTROL + "mesh/coordinator.py",
        old="if len(self._current) > 1 and _refused(self._round):",
        new="if False:",
        tests=("unit/control/test_control_coordinator.py",),
    ),
    Bug(
        name="boundary numbers are lowered",
        file=CONTROL + "mesh/coordinator.py",
        old="self._last_boundary = max(self._last_boundary, number)",
        new="self._last_boundary = number",
        tests=("unit/control/test_control_coordinator.py",),
    ),
    Bug(
        name="ranks at different steps are one capture",
        file=CONTROL + "mesh/coordinator.py",
        old="    if len(steps) > 1:\n",
        new="    if False:\n",
        tests=("unit/control/test_control_coordinator.py",),
    ),
    Bug(
        name="an answer of another incarnation counts",
        file=CONTROL + "mesh/coordinator.py",
        old="    if foreign:\n",
        new="    if False:\n",
        tests=("unit/control/test_control_coordinator.py",),
    ),
    Bug(
        name="an edit is APPLIED when the first rank says so",
        file=CONTROL + "edits/machine.py",
        old="        if len(self._applied) < self.world_size:\n            return []\n",
        new="",
        tests=("unit/control/test_edits_machine.py", "model/test_edit_machine.py"),
    ),
    Bug(
        name="an editor commits another's edit",
        file=CONTROL + "edits/service.py",
        old="    if by.name != row.actor and not by.may(Action.EDIT_ANY):\n",
        new="    if False:\n",
        tests=("integration/test_edits_control.py",),
    ),
    Bug(
        name="statistics of a slice are a viewer's",
        file=CONTROL + "access/roles.py",
        old='return Action.READ if needed is Action.VIEW and "[" in query else needed',
        new="return needed",
        tests=("unit/control/test_auth_roles.py",),
    ),
    Bug(
        name="an export appears before all of it is there",
        file="service/paramd_service/destinations/directory.py",
        old="        with explained(self._target), self._parent(make=True) as parent:\n",
        new="        self._hidden = self._last\n"
        "        with explained(self._target), self._parent(make=True) as parent:\n",
        tests=("integration/test_export_files.py",),
    ),
    Bug(
        name="an export follows symbolic links",
        file="service/paramd_service/destinations/directory.py",
        old="DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        new="DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC",
        tests=("unit/exports/test_destinations.py", "integration/test_export_files.py"),
    ),
    Bug(
        name="every rank's slice of a parameter is taken for the first one's",
        file=CLIENT + "integrations/megatron.py",
        old="        first = rank * prod(shape) if split == 0 else 0\n",
        new="        first = 0\n",
        tests=("unit/test_partitioned.py",),
    ),
)
