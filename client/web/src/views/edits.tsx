/** Edits: the log, a form with dry run, undo; and holding training. */

import { type ReactNode, useState } from "react";

import { get, post } from "../api/client";
import type { EditDocument } from "../api/schema";
import { newId, opText } from "../lib/edits";
import { clock, count, duration } from "../lib/format";
import { Badge, Dialog, Empty, Facts, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";
import { BeforeAfter, EditForm } from "./edit_form";
import { Hold } from "./hold";

export default function Edits(): ReactNode {
  const mayEdit = useMay("edit");
  const { session } = useShared();
  return (
    <>
      <div className="head">
        <h1>Edits</h1>
        {!mayEdit && (
          <span className="faint">
            {session.readonly ? "This control plane is read-only" : `The role ${session.role} may not edit`}
          </span>
        )}
      </div>
      <Hold mayEdit={mayEdit} />
      {mayEdit && <EditForm />}
      <Log mayEdit={mayEdit} />
    </>
  );
}

function Log(props: { mayEdit: boolean }): ReactNode {
  const { job, live } = useShared();
  const [filter, setFilter] = useQuery("filter");
  const [picked, setPicked] = useQuery("edit");
  const edits = usePoll(
    `${job} edits ${live.changes["edit"] ?? 0}`,
    (signal) => get("/api/v1/jobs/{job}/edits", { path: { job }, query: { limit: 200 }, signal }),
    10_000,
  );
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = (edits.data?.edits ?? []).filter((edit) => {
    const text = `${edit.id} ${edit.state} ${edit.actor} ${edit.note} ${edit.ops.map((op) => `${op.pattern} ${op.op}`).join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const chosen = edits.data?.edits.find((edit) => edit.id === picked);
  return (
    <Panel
      title="Log"
      actions={<input type="search" data-filter aria-label="Filter edits" placeholder="state, who, pattern   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />}
      source={<Source what={`/jobs/${job}/edits`} at={edits.at} error={edits.error} busy={edits.busy} refresh={edits.refresh} />}
    >
      {edits.error && <Trouble>{edits.error}</Trouble>}
      {edits.data && shown.length === 0 && <Empty>{filter ? "No edit matches the filter." : "No edits yet."}</Empty>}
      {shown.length > 0 && (
        <div className="scroll">
          <table className="plain roomy" aria-label="Edits">
            <thead>
              <tr>
                <th>when</th>
                <th>who</th>
                <th>state</th>
                <th>what</th>
                <th className="num">step</th>
                <th className="num">elements</th>
                <th>note</th>
                <th />
              </tr>
            </thead>
            <tbody>
              {shown.map((edit) => (
                <tr key={edit.id} data-edit={edit.id}>
                  <td>{clock(edit.created_s)}</td>
                  <td>
                    <Name>{edit.actor}</Name>
                  </td>
                  <td>
                    <State edit={edit} />
                  </td>
                  <td>
                    {edit.undo_of && <span className="faint">undoes {edit.undo_of.slice(0, 8)} </span>}
                    {edit.ops.map((op, i) => (
                      <div key={i}>
                        {opText(op)} <Name>{op.pattern}</Name>
                      </div>
                    ))}
                    {edit.reason && !(edit.dry_run && edit.after) && <div className="faint wrap">{edit.reason}</div>}
                  </td>
                  <td className="num">{edit.step >= 0 ? count(edit.step) : "–"}</td>
                  <td className="num">{count(edit.ops.reduce((sum, op) => sum + op.numel, 0))}</td>
                  <td className="wrap">{edit.note}</td>
                  <td>
                    <button type="button" onClick={() => setPicked(edit.id)}>
                      Show
                    </button>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {chosen && <One edit={chosen} mayEdit={props.mayEdit} onClose={() => setPicked("")} onChanged={edits.refresh} />}
    </Panel>
  );
}

/** A successful dry run ends as ABORTED; show it as what it is. */
function State(props: { edit: EditDocument }): ReactNode {
  const { edit } = props;
  const succeeded = edit.dry_run && edit.after !== null;
  return succeeded ? <Badge state="DRY RUN" tone="mute" /> : <Badge state={edit.state} />;
}

function One(props: {
  edit: EditDocument;
  mayEdit: boolean;
  onClose: () => void;
  onChanged: () => void;
}): ReactNode {
  const { edit, mayEdit, onClose, onChanged } = props;
  const { job } = useShared();
  const [problem, setProblem] = useState("");
  const [sure, setSure] = useState(false);
  const [busy, setBusy] = useState(false);
  const undo = (): void => {
    setBusy(true);
    post("/api/v1/jobs/{job}/edits/{edit}/undo", { path: { job, edit: edit.id }, body: { id: newId(), force: false, wait_s: 30 } })
      .then(() => {
        onChanged();
        onClose();
      })
      .catch((error: unknown) => setProblem(error instanceof Error ? error.message : String(error)))
      .finally(() => setBusy(false));
  };
  return (
    <Dialog title={`Edit ${edit.id.slice(0, 8)}`} onClose={onClose}>
      <Facts
        rows={[
          ["state", <State key="s" edit={edit} />],
          ["who", edit.actor],
          ["when", clock(edit.created_s)],
          ["applied at step", edit.step >= 0 ? count(edit.step) : "–"],
          ["incarnation", String(edit.incarnation)],
          ["training waited", edit.stop_ms === null ? "–" : duration(edit.stop_ms / 1000)],
          ...(edit.undo_of ? [["undoes", edit.undo_of.slice(0, 8)] as [string, string]] : []),
          ...(edit.undone_by ? [["undone by", edit.undone_by.slice(0, 8)] as [string, string]] : []),
        ]}
      />
      {edit.reason && <p className="wrap">{edit.reason}</p>}
      <Names edit={edit} />
      <BeforeAfter before={edit.before} after={edit.after} />
      {problem && <Trouble>{problem}</Trouble>}
      {mayEdit && edit.state === "APPLIED" && (
        <div className="foot">
          {!edit.undo.possible && <span className="faint wrap">cannot be undone: {edit.undo.reason}</span>}
          {edit.undo.possible && !sure && (
            <button type="button" onClick={() => setSure(true)}>
              Undo …
            </button>
          )}
          {edit.undo.possible && sure && (
            <button type="button" className="danger" disabled={busy} onClick={undo}>
              Undo: restore {count(edit.ops.reduce((sum, op) => sum + op.numel, 0))} elements
            </button>
          )}
        </div>
      )}
    </Dialog>
  );
}

/** The tensors that an edit changes. */
export function Names(props: { edit: EditDocument }): ReactNode {
  return (
    <ul className="bare list-small" aria-label="What changes">
      {props.edit.ops.map((op, i) => (
        <li key={i}>
          <strong>{opText(op)}</strong> <Name>{op.pattern}</Name>: {count(op.name_count)} tensor{op.name_count === 1 ? "" : "s"}, {count(op.numel)} elements
          {op.names.map((name) => (
            <div key={name}>
              <Name>{name}</Name>
            </div>
          ))}
          {op.name_count > op.names.length && <div className="faint">and {count(op.name_count - op.names.length)} more</div>}
        </li>
      ))}
    </ul>
  );
}
