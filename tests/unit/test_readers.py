"""Every place that reads what others may have written, and by which bound: a new one fails here."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import paramd
import paramd_service

ROOTS = (Path(paramd.__file__).parent, Path(paramd_service.__file__).parent)

KERNEL = "a file of the kernel's"
OWN = "what this program itself wrote, in a folder or a store of its user"
CHILD = "a process that this one started, from the same installation"
TRAINING = "the training's own process, or its process group"
USERS = "a file that the user names and wrote"
SHIPPED = "a file of this installation"
BOUNDED = "bounded before: "
CLIENT = "only `answers.asked` asks with it, by the bound of each request"

READERS = {
    "paramd/answers.py:asked_once.ask httpx2.AsyncClient": CLIENT,
    "paramd/answers.py:parsed_json json.loads": BOUNDED + "the helper itself",
    "paramd/answers.py:unpacked decompress": BOUNDED + "the helper itself",
    "paramd/chain.py:_claims json.loads": BOUNDED + "a record of REST_ANSWER",
    "paramd/cli/completion.py:_age_s read_text": KERNEL,
    "paramd/cli/demo.py:Training._losses read_text": CHILD,
    "paramd/cli/demo.py:_children read_text": KERNEL,
    "paramd/cli/doctor.py:_clock read_text": KERNEL,
    "paramd/cli/ended.py:Past.served readline": CHILD,
    "paramd/cli/ended.py:_last_line read_text": CHILD,
    "paramd/cli/ended.py:_parent read_text": KERNEL,
    "paramd/cli/ended.py:_read json.loads": CHILD,
    "paramd/cli/ended.py:_read run": CHILD,
    "paramd/cli/ended.py:watched read_text": KERNEL,
    "paramd/clock.py:SteadyClock.go_on_from read_text": KERNEL,
    "paramd/clock.py:SteadyClock.write read_text": KERNEL,
    "paramd/faults.py:FaultRules.at read_text": USERS,
    "paramd/integrations/engines.py:Engine.__init__ httpx2.AsyncClient": CLIENT,
    "paramd/layout/adapters.py:decode_adapters json.loads": BOUNDED + "a layout, by LAYOUT_BYTES",
    "paramd/memory/descriptors.py:_read read_text": KERNEL,
    "paramd/memory/device_driver.py:_hip_library read_text": KERNEL,
    "paramd/memory/handover.py:_parse json.loads": BOUNDED + "MAX_MESSAGE_BYTES",
    "paramd/memory/left.py:_read read_text": KERNEL,
    "paramd/memory/left.py:memory_now read_text": KERNEL,
    "paramd/memory/optimizer_state.py:parse_text decompress": BOUNDED + "_MAX_TEXT_BYTES",
    "paramd/memory/optimizer_state.py:parse_text json.loads": BOUNDED + "_MAX_TEXT_BYTES",
    "paramd/memory/optimizer_state.py:read_plain json.loads": BOUNDED + "MAX_PAYLOAD_BYTES",
    "paramd/mesh/exports/calls.py:ExportFiles.read read_bytes": BOUNDED + "REST_FILE_PART",
    "paramd/mesh/exports/download.py:_umask read_text": KERNEL,
    "paramd/mesh/exports/pins.py:_tables.one read_bytes": BOUNDED + "the size of a pin",
    "paramd/mesh/peers/control.py:RestClient._client_of httpx2.AsyncClient": CLIENT,
    "paramd/mesh/peers/grpc.py:_stream read": BOUNDED + "BoundedChannel",
    "paramd/mesh/reading/reductions.py:read_texts read_bytes": BOUNDED + "MAX_VALUES_BYTES",
    "paramd/parts.py:_read read": SHIPPED,
    "paramd/places.py:_take_in json.loads": OWN,
    "paramd/security/authority.py:_authority read_bytes": OWN,
    "paramd/security/channel.py:open_bounded grpc.aio.insecure_channel": BOUNDED + "here",
    "paramd/security/channel.py:open_bounded grpc.aio.secure_channel": BOUNDED + "here",
    "paramd/security/loopback.py:Question.check json.loads": BOUNDED + "PROOF",
    "paramd/security/loopback.py:_sockets read_text": KERNEL,
    "paramd/security/tickets.py:_parse json.loads": BOUNDED + "a request's metadata, 4 KiB",
    "paramd/state_files.py:host_id read_text": KERNEL,
    "paramd/state_files.py:process_start read_text": KERNEL,
    "paramd/state_files.py:read_toml tomllib.loads": BOUNDED + "MAX_TOML_BYTES",
    "paramd/state_files.py:resident_bytes read_text": KERNEL,
    "paramd/trainer/attaching/addresses.py:_ipv6_of read_text": KERNEL,
    "paramd/trainer/attaching/discovering.py:Discovering.identify json.loads": TRAINING,
    "paramd/trainer/attaching/exchange.py:Exchange.gather json.loads": TRAINING,
    "paramd/trainer/attaching/exporting.py:export json.loads": TRAINING,
    "paramd/trainer/boundary/optimizers.py:HyperparameterChange.__init__ json.loads": BOUNDED
    + "a note of an edit, which its sidecar has checked",
    "paramd/trainer/helpers/control_link.py:ControlLink._start json.loads": CHILD,
    "paramd/trainer/helpers/control_link.py:ControlLink._start readline": CHILD,
    "paramd/trainer/helpers/insight.py:Insight._wait json.loads": BOUNDED + "MAX_MESSAGE_BYTES",
    "paramd/trainer/helpers/insight.py:collectives json.loads": TRAINING,
    "paramd/trainer/helpers/sidecar_link.py:_cpu_s read_text": KERNEL,
    "paramd/trainer/model/adapters.py:_config_text read_text": USERS,
    "paramd/trainer/model/extra_state.py:_plain json.loads": TRAINING,
    "paramd/trainer/resume/codec.py:decode json.loads": BOUNDED + "MAX_PAYLOAD_BYTES",
    "paramd/trainer/resume/copies.py:_label_of json.loads": BOUNDED + "_MAX_LABEL_BYTES",
    "paramd/trainer/summon/meeting.py:Rendezvous._judged json.loads": TRAINING,
    "paramd/trainer/summon/meeting.py:Rendezvous._meet json.loads": TRAINING,
    "paramd_service/admission.py:_private_bytes read_text": KERNEL,
    "paramd_service/alerts/webhook.py:Webhooks.__init__ httpx2.AsyncClient": BOUNDED
    + "WEBHOOK: of an answer only the head is read",
    "paramd_service/alerts/costs.py:_cpu_s read_text": KERNEL,
    "paramd_service/alerts/costs.py:_is_sidecar read_bytes": KERNEL,
    "paramd_service/control/api/guard.py:_answer read_bytes": SHIPPED,
    "paramd_service/control/api/guard.py:_file read_bytes": SHIPPED,
    "paramd_service/audit/rest.py:record_of json.loads": OWN,
    "paramd_service/control/base/config.py:read_bootstrap json.loads": BOUNDED
    + "MAX_BOOTSTRAP_BYTES",
    "paramd_service/control/base/config.py:table_of_text json.loads": USERS,
    "paramd_service/edits/incarnation.py:touches json.loads": OWN,
    "paramd_service/exports/documents.py:load_added read_text": OWN,
    "paramd_service/control/base/processes.py:ask_process communicate": CHILD,
    "paramd_service/control/base/processes.py:ask_process json.loads": CHILD,
    "paramd_service/control/base/processes.py:answers.answered json.load": CHILD,
    "paramd_service/control/mesh/sidecars.py:_messages read": BOUNDED + "BoundedChannel",
    "paramd_service/alerts/store.py:AlertStore.page json.loads": OWN,
    "paramd_service/control/store/edits.py:edit_of decompress": OWN,
    "paramd_service/control/store/edits.py:edit_of json.loads": OWN,
    "paramd_service/exports/store.py:_export json.loads": OWN,
    "paramd_service/exports/store.py:_schedule json.loads": OWN,
    "paramd_service/control/store/migrations/versions/r0006_alerts.py:_values json.loads": OWN,
    "paramd_service/control/store/migrations/versions/r0008_schedules.py:_end json.loads": OWN,
    "paramd_service/control/store/migrations/versions/r0008_schedules.py:upgrade json.loads": OWN,
    "paramd_service/formats/blend.py:Blender._why communicate": CHILD,
    "paramd_service/formats/blend.py:Blender.close communicate": CHILD,
    "paramd_service/formats/blend_process.py:main json.loads": CHILD,
    "paramd_service/formats/blend_process.py:main readline": CHILD,
    "paramd_service/formats/dcp.py:_unpacked json.loads": CHILD,
    "paramd_service/formats/dcp.py:dcp_files run": CHILD,
    "paramd_service/formats/dcp_writer.py:_written read_bytes": CHILD,
    "paramd_service/formats/dcp_writer.py:main json.load": CHILD,
    "paramd_service/edits/notes.py:check json.loads": BOUNDED + "a manifest of an edit",
    "paramd_service/insight/line.py:TrainerLine._readable json.loads": BOUNDED
    + "MAX_MESSAGE_BYTES",
    "paramd_service/insight/process.py:_fields read_text": KERNEL,
    "paramd_service/hosts/facts.py:_delay_s read_text": KERNEL,
    "paramd_service/hosts/facts.py:_pressure read_text": KERNEL,
    "paramd_service/hosts/facts.py:_processor_s read_text": KERNEL,
    "paramd_service/hosts/facts.py:_retransmits read_text": KERNEL,
    "paramd_service/sidecar/main.py:read_pems json.loads": BOUNDED + "MAX_PEMS_BYTES",
    "paramd_service/sidecar/owner.py:exit_of read_text": KERNEL,
    "paramd_service/sidecar/owner.py:process_state read_text": KERNEL,
    "paramd_service/sidecar/owner.py:worked read_text": KERNEL,
    "paramd_service/exports/write.py:PeerMemory._fetched read_bytes": BOUNDED
    + "what was asked for",
    "paramd_service/gateway/gather.py:_land read_bytes": BOUNDED + "what was asked for",
    "paramd_service/tls.py:_load read": BOUNDED + "CA_FILE",
}
"""Each place that reads without a helper of `paramd.answers`, and why it may.

Whatever peers, stores, receivers or other users' files say is read by `answers.read_file`,
`read_descriptor`, `parsed_json`, `unpacked`, `asked`, `asked_once` or `said`, each by a row of
`paramd.bounds`; over gRPC, by `security.channel`.
"""

WHOLE = frozenset(
    ("read_text", "read_bytes", "urlopen", "communicate", "decompress", "aread", "check_output")
)
"""Calls, by their last name, that read or unpack all there is."""
PARSERS = frozenset(("json.load", "json.loads", "tomllib.load", "tomllib.loads", "pickle.loads"))
CLIENTS = frozenset(("AsyncClient", "Client", "get", "post", "request", "stream"))
CHANNELS = frozenset(("grpc.aio.insecure_channel", "grpc.aio.secure_channel"))
ALL = frozenset(("read", "readline", "readlines"))
"""Calls that read all there is when they have no arguments."""
LAST = WHOLE | CLIENTS | ALL | {one.rpartition(".")[2] for one in PARSERS | CHANNELS} | {"run"}
IN_MEMORY = frozenset(("read_text(page)", "read_text(self._page)"))
"""Of the control page, whose text has a fixed size."""


def reader_of(call: ast.Call) -> str:
    """The name of a call that reads without a bound; empty for any other."""
    func = call.func
    last = (
        func.attr
        if isinstance(func, ast.Attribute)
        else func.id
        if isinstance(func, ast.Name)
        else ""
    )
    if last not in LAST:
        return ""
    whole = ast.unparse(func)
    bare = not call.args and not call.keywords
    captures = any(one.arg in ("capture_output", "stdout") for one in call.keywords)
    if ast.unparse(call) in IN_MEMORY:
        return ""
    if whole in PARSERS | CHANNELS or (whole.startswith("httpx2.") and last in CLIENTS):
        return whole
    if last in WHOLE or (last in ALL and bare):
        return last
    return "run" if last == "run" and captures else ""


def readers(node: ast.AST, where: tuple[str, ...] = ()) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*where, child.name)
        if isinstance(child, ast.Call) and (name := reader_of(child)):
            yield f"{'.'.join(where)} {name}"
        yield from readers(child, inside)


@cache
def found() -> frozenset[str]:
    places: set[str] = set()
    for root in ROOTS:
        for path in root.rglob("*.py"):
            name = path.relative_to(root.parent)
            if "v1" not in name.parts:
                places |= {f"{name}:{one}" for one in readers(ast.parse(path.read_text()))}
    return frozenset(places)


def test_every_place_that_reads_has_a_bound() -> None:
    assert found() - READERS.keys() == set(), "read by a helper of paramd.answers, or name it"


def test_the_table_has_no_place_that_is_gone() -> None:
    assert READERS.keys() - found() == set()
