/** The edit form: an edit is applied only after a dry run and a confirmation. */

import { type FormEvent, type ReactNode, useState } from "react";

import { post } from "../api/client";
import type { Edit, ValueRange } from "../api/schema";
import { bodyOf, type Draft, EMPTY, FIELDS, MEANING, newId, type Op, OPS } from "../lib/edits";
import { count, number } from "../lib/format";
import { Badge, Dialog, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { useQuery } from "../ui/hooks";
import { Names, sizeText } from "./edits";

interface Tried {
  draft: Draft;
  edit: Edit;
  at: number;
}

export function EditForm(): ReactNode {
  const { job } = useShared();
  const admin = useMay("administer");
  const [pattern, setPattern] = useQuery("pattern");
  const [draft, setDraft] = useState<Draft>(EMPTY);
  const [tried, setTried] = useState<Tried | null>(null);
  const [asking, setAsking] = useState(false);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const [done, setDone] = useState<Edit | null>(null);
  const whole: Draft = { ...draft, pattern };
  const set = (patch: Partial<Draft>): void => {
    setDraft({ ...draft, ...patch });
    setTried(null);
  };
  const send = async (dryRun: boolean): Promise<Edit | null> => {
    const made = bodyOf(whole, newId(), dryRun);
    if ("problem" in made) {
      setProblem(made.problem);
      return null;
    }
    setProblem("");
    setBusy(true);
    try {
      return await post("/api/v1/jobs/{job}/edits", { path: { job }, body: made.body });
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
      return null;
    } finally {
      setBusy(false);
    }
  };
  const dry = (event: FormEvent): void => {
    event.preventDefault();
    setDone(null);
    void send(true).then((edit) => edit && setTried({ draft: whole, edit, at: Date.now() }));
  };
  const apply = (): void => {
    void send(false).then((edit) => {
      setAsking(false);
      if (!edit) return;
      setDone(edit);
      setTried(null);
    });
  };
  return (
    <Panel
      title="Change parameters"
      source={tried && <Source what="dry run" at={tried.at} step={tried.edit.step} incarnation={tried.edit.incarnation} />}
    >
      <form className="form" onSubmit={dry} aria-label="Edit">
        <label className="field full">
          Parameters (names or globs, optionally with a slice)
          <input type="text" className="mono" name="pattern" spellCheck={false} placeholder="layers.0.up.weight[0:4]" value={pattern} onChange={(event) => { setPattern(event.target.value); setTried(null); }} />
        </label>
        <label className="field broad">
          Operation
          <select name="op" value={draft.op} onChange={(event) => set({ op: event.target.value as Op })}>
            {OPS.map((op) => (
              <option key={op} value={op}>
                {op}: {MEANING[op]}
              </option>
            ))}
          </select>
        </label>
        {FIELDS[draft.op].map((field) => (
          <label className="field" key={field}>
            {field}
            <input type="text" inputMode="decimal" name={field} value={draft[field]} onChange={(event) => set({ [field]: event.target.value })} />
          </label>
        ))}
        <label className="field">
          Only at step
          <input type="text" inputMode="numeric" placeholder="any" name="if_step" value={draft.ifStep} onChange={(event) => set({ ifStep: event.target.value })} />
        </label>
        <label className="field">
          Note for the log
          <input type="text" name="note" maxLength={200} value={draft.note} onChange={(event) => set({ note: event.target.value })} />
        </label>
        <label className="tick">
          <input type="checkbox" checked={draft.resetMoments} onChange={(event) => set({ resetMoments: event.target.checked })} />
          reset the optimizer's moments of these elements
        </label>
        {admin && (
          <label className="tick">
            <input type="checkbox" checked={draft.allowNonfinite} onChange={(event) => set({ allowNonfinite: event.target.checked })} />
            allow NaN and Inf
          </label>
        )}
        <div className="actions full">
          <button type="submit" className={tried ? "" : "main"} disabled={busy}>
            Dry run
          </button>
          <button type="button" className={tried ? "main" : ""} disabled={!tried || busy} onClick={() => setAsking(true)}>
            Apply …
          </button>
          {!tried && <span className="faint">do a dry run first: it shows what would change, and changes nothing</span>}
        </div>
      </form>
      {problem && <Trouble>{problem}</Trouble>}
      {tried && (
        <>
          <Names edit={tried.edit} />
          <BeforeAfter before={tried.edit.before} after={tried.edit.after} />
        </>
      )}
      {done && (
        <p role="status">
          <Badge state={done.state} /> {done.step >= 0 ? `at step ${count(done.step)}` : ""} {done.reason}
        </p>
      )}
      {asking && tried && (
        <Dialog title="Change these parameters of the running training?" onClose={() => setAsking(false)}>
          <Names edit={tried.edit} />
          <BeforeAfter before={tried.edit.before} after={tried.edit.after} />
          <p className="faint">Before and after are from the dry run{tried.edit.step >= 0 ? `, at step ${count(tried.edit.step)}` : ""}; values change while training runs.</p>
          {problem && <Trouble>{problem}</Trouble>}
          <div className="foot">
            <button type="button" onClick={() => setAsking(false)}>
              Cancel
            </button>
            <button type="button" className="danger" disabled={busy} onClick={apply}>
              Change {sizeText(tried.edit)}
            </button>
          </div>
        </Dialog>
      )}
    </Panel>
  );
}

export function BeforeAfter(props: { before: ValueRange | null; after: ValueRange | null }): ReactNode {
  const { before, after } = props;
  if (!before && !after) return null;
  return (
    <div className="scroll">
      <table className="plain narrow" aria-label="Before and after">
        <thead>
          <tr>
            <th>when</th>
            {(["norm", "mean", "min", "max", "NaN", "Inf"] as const).map((title) => (
              <th key={title} className="num">
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {([["before", before], ["after", after]] as const).map(([label, found]) => (
            <tr key={label}>
              <td>{label}</td>
              <td className="num">{number(found?.norm, 6)}</td>
              <td className="num">{number(found?.mean, 5)}</td>
              <td className="num">{number(found?.min, 5)}</td>
              <td className="num">{number(found?.max, 5)}</td>
              <td className="num">{found ? count(found.nan_count) : "–"}</td>
              <td className="num">{found ? count(found.inf_count) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
