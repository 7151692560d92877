/** A restore point or a checkpoint of now, from wherever one is. */

import { type ReactNode, useState } from "react";

import { get, post } from "../api/client";
import type { Mark } from "../api/schema";
import { defaultKey, STEP } from "../lib/checkpoint";
import { clock, count } from "../lib/format";
import { placeHash, type View } from "../lib/route";
import { Trouble } from "../ui/bits";
import { useShared, whyDead } from "../ui/context";
import { Question, Text, Tick, useSending } from "../ui/form";
import { go, usePoll } from "../ui/hooks";
import { type Draft, EMPTY, NoDestination, requestOf, Target } from "./export_form";

/** Why no restore point can be made now; empty: one can. A training that can keep one has automatic ones. */
export function whyNoMark(marks: readonly Mark[] | null): string {
  if (marks === null || marks.length > 0) return "";
  return 'This training keeps no restore points: they need paramd.attach(..., resume="auto"). If it has that, the first automatic one is made soon.';
}

export function RestorePoint(props: { onClose: () => void }): ReactNode {
  const { job } = useShared();
  const [name, setName] = useState(() => `at ${clock(Date.now() / 1000)}`);
  const sending = useSending();
  const [made, setMade] = useState<Mark | null>(null);
  const marks = usePoll(`${job} marks now`, (signal) => get("/api/v1/jobs/{job}/marks", { path: { job }, signal }), 5000);
  const why = whyNoMark(marks.data?.marks ?? null);
  const create = (): void => sending.send(post("/api/v1/jobs/{job}/marks", { path: { job }, body: { name: name.trim() } }), setMade);
  const all = <Elsewhere view="edits" onClose={props.onClose}>All restore points</Elsewhere>;
  return (
    <Question title="Create a restore point?" action={made ? "Created" : "Create it"} leave={made ? "Close" : "Cancel"} sending={sending} why={why} disabled={made !== null || why !== "" || !name.trim()} onGo={create} onClose={props.onClose} beside={all}>
      <p>The complete state of the next step (parameters, optimizer, random states) is kept in memory under a name, to roll back to. Training pauses while the state is copied.</p>
      <Text label="Name" max={64} value={name} onChange={setName} />
      {why && <p className="faint">{why}</p>}
      {made && <p role="status">Restore point {made.name} is kept, of step {count(made.step)}.</p>}
    </Question>
  );
}

function Elsewhere(props: { view: View; onClose: () => void; children: ReactNode }): ReactNode {
  return (
    <a className="button" href={placeHash({ job: useShared().job, view: props.view, query: {} })} onClick={props.onClose}>
      {props.children}
    </a>
  );
}

export function Checkpoint(props: { onClose: () => void }): ReactNode {
  const { job, jobs, summary } = useShared();
  const dead = whyDead(summary);
  const [draft, setDraft] = useState<Draft>({ ...EMPTY, key: defaultKey(job, jobs), buffers: dead === "" });
  const sending = useSending();
  const found = usePoll("destinations", (signal) => get("/api/v1/destinations", { signal }), 0);
  const all = found.data?.destinations ?? [];
  const chosen = draft.name || (all[0]?.name ?? "");
  const start = (): void =>
    sending.send(post("/api/v1/jobs/{job}/exports", { path: { job }, body: requestOf(draft, chosen) }), (made) => {
      props.onClose();
      go({ job, view: "exports", query: { export: made.id } });
    });
  const more = <Elsewhere view="exports" onClose={props.onClose}>More choices</Elsewhere>;
  return (
    <Question title="Write a checkpoint now?" action="Write it" sending={sending} disabled={!chosen || !draft.key.trim()} onGo={start} onClose={props.onClose} beside={more}>
      <p>
        {dead ? "Saves the last step from the memory that is still held here, without buffers, then verifies the files." : "Saves the next step without stopping training, then verifies the files."}
        {draft.key.includes(STEP) ? ` ${STEP} becomes the step of the files.` : ""}
      </p>
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.data && all.length === 0 && <NoDestination />}
      <div className="form">
        <Target all={all} name={chosen} draft={draft} onChange={setDraft} />
        <Tick label="with the optimizer's state (as DCP)" checked={draft.optimizer} onChange={(optimizer) => setDraft({ ...draft, optimizer, format: optimizer ? "dcp" : "safetensors" })} />
      </div>
    </Question>
  );
}
