/** The edit form: an edit is applied only after a dry run and a confirmation. */

import { type FormEvent, type ReactNode, useState } from "react";

import { post } from "../api/client";
import type { Edit, ValueRange } from "../api/schema";
import { bodyOf, type Draft, EMPTY, FIELDS, MEANING, newId, type Op, OPS } from "../lib/edits";
import { count, number } from "../lib/format";
import { Badge, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { Question, Select, Text, Tick, useSending } from "../ui/form";
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
  const { busy, problem, send, say } = useSending();
  const [done, setDone] = useState<Edit | null>(null);
  const whole: Draft = { ...draft, pattern };
  const set = (patch: Partial<Draft>): void => {
    setDraft({ ...draft, ...patch });
    setTried(null);
  };
  const ask = (dryRun: boolean, then: (edit: Edit) => void): void => {
    const made = bodyOf(whole, newId(), dryRun);
    if ("problem" in made) say(made.problem);
    else send(post("/api/v1/jobs/{job}/edits", { path: { job }, body: made.body }), then);
  };
  const dry = (event: FormEvent): void => {
    event.preventDefault();
    setDone(null);
    ask(true, (edit) => setTried({ draft: whole, edit, at: Date.now() }));
  };
  const apply = (): void =>
    ask(false, (edit) => {
      setAsking(false);
      setDone(edit);
      setTried(null);
    });
  return (
    <Panel
      title="Change parameters"
      source={tried && <Source what="DRY RUN" at={tried.at} step={tried.edit.step} incarnation={tried.edit.incarnation} />}
    >
      <form className="form" onSubmit={dry} aria-label="Edit">
        <Text label="Parameters (names or globs, optionally with a slice)" wide="full" name="pattern" mono placeholder="layers.0.up.weight[0:4]" value={pattern} onChange={(value) => { setPattern(value); setTried(null); }} />
        <Select label="Operation" name="op" wide="broad" value={draft.op} options={OPS.map((op) => [op, `${op}: ${MEANING[op]}`] as const)} onChange={(op) => set({ op: op as Op })} />
        {FIELDS[draft.op].map((field) => (
          <Text key={field} label={field} name={field} numeric value={draft[field]} onChange={(value) => set({ [field]: value })} />
        ))}
        <Text label="Only at step" name="if_step" numeric placeholder="any" value={draft.ifStep} onChange={(ifStep) => set({ ifStep })} />
        <Text label="Note for the log" name="note" max={200} value={draft.note} onChange={(note) => set({ note })} />
        <Tick label="reset the optimizer's moments of these elements" checked={draft.resetMoments} onChange={(resetMoments) => set({ resetMoments })} />
        {admin && <Tick label="allow NaN and Inf" checked={draft.allowNonfinite} onChange={(allowNonfinite) => set({ allowNonfinite })} />}
        <div className="actions full">
          <button type="submit" className={tried ? "" : "main"} disabled={busy}>
            Dry run
          </button>
          <button type="button" className={tried ? "main" : ""} disabled={!tried || busy} onClick={() => { say(""); setAsking(true); }}>
            Apply …
          </button>
          {!tried && <span className="faint">do a dry run first: it shows what would change, and changes nothing</span>}
        </div>
      </form>
      {problem && !asking && <Trouble>{problem}</Trouble>}
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
        <Question title="Change these parameters of the running training?" action={`Change ${sizeText(tried.edit)}`} danger sending={{ busy, problem }} onGo={apply} onClose={() => setAsking(false)}>
          <Names edit={tried.edit} />
          <BeforeAfter before={tried.edit.before} after={tried.edit.after} />
          <p className="faint">Before and after are from the dry run{tried.edit.step >= 0 ? `, at step ${count(tried.edit.step)}` : ""}; values change while training runs.</p>
        </Question>
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
