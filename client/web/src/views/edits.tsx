/** Edits: the log, a form with dry run, undo; and pausing training. */

import { type ReactNode, useEffect, useMemo, useState } from "react";

import { get, post } from "../api/client";
import type { Edit } from "../api/schema";
import { discardedOf, newId, opText } from "../lib/edits";
import { clock, count, duration, plural } from "../lib/format";
import { editText, sizeOf } from "../lib/timeline";
import { Badge, Dialog, Empty, Facts, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared, useWhyNot, whyDead } from "../ui/context";
import { Question, useSending } from "../ui/form";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";
import { textOf } from "../ui/problems";
import { BeforeAfter, EditForm } from "./edit_form";
import { Marks } from "./marks";
import { Rates } from "./rates";

export default function Edits(): ReactNode {
  const whyNot = useWhyNot("edit");
  const mayEdit = whyNot === "";
  const { summary } = useShared();
  const over = summary?.state === "ended";
  const [pattern] = useQuery("pattern");
  // A link that names parameters is for changing them.
  const [open, setOpen] = useState(pattern !== "");
  return (
    <>
      <div className="head">
        <h1>Edits</h1>
        {whyNot && whyNot !== whyDead(summary) && <span className="faint">{whyNot}</span>}
        {mayEdit && (
          <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
            {open ? "Close the form" : "Change parameters …"}
          </button>
        )}
      </div>
      {mayEdit && open && <EditForm />}
      <Log mayEdit={mayEdit} />
      {!over && <Rates />}
      {!over && <Marks mayEdit={mayEdit} />}
    </>
  );
}

function Log(props: { mayEdit: boolean }): ReactNode {
  const { job, live } = useShared();
  const [filter, setFilter] = useQuery("filter");
  const [picked, setPicked] = useQuery("edit");
  const [undoing, setUndoing] = useQuery("undo");
  const edits = usePoll(
    `${job} edits`,
    (signal) => get("/api/v1/jobs/{job}/edits", { path: { job }, query: { limit: 200 }, signal }),
    10_000,
    live.changes["edit"] ?? 0,
  );
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = (edits.data?.edits ?? []).filter((edit) => {
    const text = `${edit.id} ${edit.incarnation} ${edit.state} ${edit.actor} ${edit.note} ${edit.ops.map((op) => `${op.pattern} ${op.op}`).join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const all = edits.data?.edits ?? [];
  const chosen = all.find((edit) => edit.id === picked);
  const undone = all.find((edit) => edit.id === undoing);
  const discarded = useMemo(() => discardedOf(all), [edits.data]);
  const several = new Set(all.map((edit) => edit.incarnation)).size > 1;
  return (
    <Panel
      title="Log"
      className="log-space"
      actions={<input type="search" data-filter aria-label="Filter edits" placeholder="state, who, pattern   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />}
      source={<Source what={`/jobs/${job}/edits`} at={edits.at} error={edits.error} busy={edits.busy} refresh={edits.refresh} />}
    >
      {edits.error && <Trouble>{edits.error}</Trouble>}
      {!edits.data && !edits.error && <Empty>Loading …</Empty>}
      {edits.data && shown.length === 0 && <Empty>{filter ? "No edit matches the filter." : "No edits yet."}</Empty>}
      {shown.length > 0 && (
        <div className="scroll log-rows" tabIndex={0} role="region" aria-label="Log">
          <table className="plain roomy" aria-label="Edits">
            <thead>
              <tr>
                <th>when</th>
                <th>who</th>
                <th>state</th>
                <th>what</th>
                {several && <th className="num">run</th>}
                <th className="num">step</th>
                <th className="num">changed</th>
                <th>note</th>
                <th>do</th>
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
                    {discarded.has(edit.id) ? <Badge state="DISCARDED" tone="mute" /> : <State edit={edit} />}
                  </td>
                  <td>
                    {edit.undo_of ? `undoes ${edit.undo_of.slice(0, 8)}` : <span className="wrap">{editText(edit)}</span>}
                    {discarded.has(edit.id) && <span className="faint"> left behind by a rollback to a step before it</span>}
                    {edit.undone_by && <span className="faint"> undone by {edit.undone_by.slice(0, 8)}</span>}
                    {edit.reason && !(edit.dry_run && edit.after) && <div className="faint wrap">{edit.reason}</div>}
                  </td>
                  {several && <td className="num">{edit.incarnation}</td>}
                  <td className="num">{edit.step >= 0 ? count(edit.step) : "–"}</td>
                  <td className="num" title={sizeText(edit)}>{count(sizeOf(edit).elements)}</td>
                  <td className="wrap">{edit.note}</td>
                  <td>
                    <div className="actions">
                      <button type="button" className="small" onClick={() => setPicked(edit.id)}>
                        Show
                      </button>
                      {props.mayEdit && edit.undo.possible && !discarded.has(edit.id) && (
                        <button type="button" className="small" onClick={() => setUndoing(edit.id)}>
                          Undo …
                        </button>
                      )}
                    </div>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {undone && !undone.undo.possible && <Empty>The edit {undone.id.slice(0, 8)} cannot be undone: {undone.undo.reason}</Empty>}
      {picked && edits.data && !chosen && (
        <Empty>
          The edit {picked.slice(0, 8)} is not among the last {count(edits.data.edits.length)} of this job.
        </Empty>
      )}
      {chosen && <One edit={chosen} mayEdit={props.mayEdit && !discarded.has(chosen.id)} onClose={() => setPicked("")} onUndo={() => patchQuery({ edit: "", undo: chosen.id })} />}
      {undone && undone.undo.possible && !discarded.has(undone.id) && <Undo edit={undone} later={laterThan(undone, all)} onClose={() => setUndoing("")} onChanged={edits.refresh} />}
    </Panel>
  );
}

/** A successful dry run ends as ABORTED; show it as what it is. */
function State(props: { edit: Edit }): ReactNode {
  const { edit } = props;
  const succeeded = edit.dry_run && edit.after !== null;
  return succeeded ? <Badge state="DRY RUN" tone="mute" /> : <Badge state={edit.state} />;
}

function One(props: { edit: Edit; mayEdit: boolean; onClose: () => void; onUndo: () => void }): ReactNode {
  const { edit, mayEdit, onClose, onUndo } = props;
  return (
    <Dialog title={`Edit ${edit.id.slice(0, 8)}`} onClose={onClose}>
      <Facts
        rows={[
          ["state", <State key="s" edit={edit} />],
          ["who", edit.actor],
          ["when", clock(edit.created_s)],
          ["applied at step", edit.step >= 0 ? count(edit.step) : "–"],
          ["run", String(edit.incarnation)],
          ["training waited", edit.stop_ms === null ? "–" : duration(edit.stop_ms / 1000)],
          ...(edit.undo_of ? [["undoes", edit.undo_of.slice(0, 8)] as [string, string]] : []),
          ...(edit.undone_by ? [["undone by", edit.undone_by.slice(0, 8)] as [string, string]] : []),
        ]}
      />
      {edit.note && <p className="wrap">{edit.note}</p>}
      {edit.reason && <p className="wrap">{edit.reason}</p>}
      {edit.warning && <p className="wrap">{edit.warning}</p>}
      <Names edit={edit} />
      <BeforeAfter before={edit.before} after={edit.after} />
      <div className="foot">
        {edit.state === "APPLIED" && !edit.undo.possible && <span className="faint wrap">cannot be undone: {edit.undo.reason}</span>}
        {mayEdit && edit.undo.possible && (
          <button type="button" onClick={onUndo}>
            Undo …
          </button>
        )}
        <button type="button" onClick={onClose}>
          Close
        </button>
      </div>
    </Dialog>
  );
}

/** Applied edits since this one that touch a tensor of it: the server refuses or overwrites them. */
function laterThan(edit: Edit, all: readonly Edit[]): Edit[] {
  const names = new Set(edit.ops.flatMap((op) => op.names));
  return all.filter(
    (other) =>
      other.id !== edit.id &&
      other.state === "APPLIED" &&
      !other.undone_by &&
      other.created_s > edit.created_s &&
      other.ops.some((op) => op.names.some((name) => names.has(name))),
  );
}

type Tried = { edit: Edit } | { problem: string } | null;

/** The undo of an edit of parameters on trial, begun as the question opens; null while it runs, or for other edits. */
function useTried(edit: Edit): Tried {
  const { job } = useShared();
  const [tried, setTried] = useState<Tried>(null);
  const wanted = edit.ops.length > 0;
  useEffect(() => {
    if (!wanted) return;
    const controller = new AbortController();
    const body = { id: newId(), force: false, dry_run: true, wait_s: 30 };
    const told = (next: Tried): void => (controller.signal.aborted ? undefined : setTried(next));
    post("/api/v1/jobs/{job}/edits/{edit}/undo", { path: { job, edit: edit.id }, body })
      .then((found) => told(found.after ? { edit: found } : { problem: found.reason }))
      .catch((error: unknown) => told({ problem: textOf(error) }));
    return () => controller.abort();
  }, [job, edit.id, wanted]);
  return tried;
}

/** The question before an undo: what a dry run of it shows, what is restored, and what is lost by it. */
function Undo(props: { edit: Edit; later: readonly Edit[]; onClose: () => void; onChanged: () => void }): ReactNode {
  const { edit, later, onClose, onChanged } = props;
  const { job, live } = useShared();
  const sending = useSending();
  const tried = useTried(edit);
  const waits = edit.ops.length > 0 && tried === null;
  const steps = live.incarnation === edit.incarnation ? Math.max(0, live.step - edit.step) : -1;
  const undo = (): void =>
    sending.send(post("/api/v1/jobs/{job}/edits/{edit}/undo", { path: { job, edit: edit.id }, body: { id: newId(), force: false, dry_run: false, wait_s: 30 } }), () => {
      onChanged();
      onClose();
    });
  const action = edit.rollback ? `Undo: go forward to step ${count(edit.step)}` : edit.hyperparameters ? "Undo: restore the values" : `Undo: restore ${plural(sizeOf(edit).elements, "element")}`;
  return (
    <Question title={`Undo edit ${edit.id.slice(0, 8)} by ${edit.actor}?`} action={action} danger disabled={waits} sending={sending} onGo={undo} onClose={onClose}>
      <Names edit={edit} />
      {waits && <p className="faint" role="status">Tries it on all ranks, without changing anything …</p>}
      {tried && "edit" in tried && (
        <>
          <p role="status">DRY RUN: nothing has changed yet. The undo would do this:</p>
          <BeforeAfter before={tried.edit.before} after={tried.edit.after} />
        </>
      )}
      {tried && "problem" in tried && <Trouble>No dry run of it: {tried.problem}</Trouble>}
      {edit.rollback ? (
        <p>
          Training goes forward again to step {count(edit.step)}, which was left. <strong>All updates made since the rollback are lost.</strong>
        </p>
      ) : edit.hyperparameters ? (
        <p>The values that there were before step {count(edit.step)} come back: {editText(edit)}.</p>
      ) : (
      <p>
        Restores the values that these elements had before step {count(edit.step)}.{" "}
        <strong>
          What they have learned since is lost{steps > 0 ? `: ${plural(steps, "update")}` : ""}.
        </strong>{" "}
        All other elements stay as they are. Optimizer state that the edit reset stays reset.
      </p>
      )}
      {later.length > 0 && (
        <p className="wrap">
          Later edits of the same tensors: {later.map((other) => `${other.id.slice(0, 8)} by ${other.actor} (${editText(other)})`).join("; ")}. If they overlap, undo those first.
        </p>
      )}
    </Question>
  );
}

export function sizeText(edit: Edit): string {
  const { tensors, elements } = sizeOf(edit);
  return `${plural(elements, "element")} of ${plural(tensors, "tensor")}`;
}

/** The tensors that an edit changes. */
export function Names(props: { edit: Edit }): ReactNode {
  return (
    <ul className="bare list-small" tabIndex={0} aria-label="What changes">
      {props.edit.ops.map((op, i) => (
        <li key={i}>
          <strong>{opText(op)}</strong> <Name>{op.pattern}</Name>: {plural(op.name_count, "tensor")}, {plural(op.numel, "element")}
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
