/** A checkpoint loaded back into the running training: a dry run first, then all ranks at one step. */

import { type ReactNode, useState } from "react";

import { del, post } from "../api/client";
import type { Edit, ExportInfo } from "../api/schema";
import { count } from "../lib/format";
import { newId } from "../lib/edits";
import { useShared } from "../ui/context";
import { Question, Tick, useSending } from "../ui/form";
import { BeforeAfter } from "./edit_form";
import { sizeText } from "./edits";

/** The files are read, and sent to every rank. */
const PATIENCE_S = 330;
const WAIT_S = 60;

/** Why a checkpoint cannot be loaded from here; empty: it can. */
export function whyNoLoad(one: ExportInfo): string {
  if (one.format === "dcp") return "A dcp checkpoint is loaded by the script (torch.distributed.checkpoint)";
  if (one.format === "peft") return "It holds an adapter alone, which PEFT loads";
  return "";
}

export function Load(props: { one: ExportInfo; onClose: () => void }): ReactNode {
  const { one, onClose } = props;
  const { job, live } = useShared();
  const sending = useSending();
  const [reset, setReset] = useState(false);
  const [tried, setTried] = useState<Edit | null>(null);
  const [done, setDone] = useState<Edit | null>(null);
  const go = (): void => {
    if (tried) {
      const path = { job, edit: tried.id };
      sending.send(post("/api/v1/jobs/{job}/edits/{edit}/commit", { path, body: { wait_s: WAIT_S }, patienceS: PATIENCE_S }), (edit) =>
        edit.state === "APPLIED" ? setDone(edit) : `${edit.state}: ${edit.reason || "not applied yet; see the log of edits"}`,
      );
      return;
    }
    const body = { id: newId(), preview: true, reset_moments: reset, note: "", wait_s: 0 };
    sending.send(post("/api/v1/jobs/{job}/exports/{export}/load", { path: { job, export: one.id }, body, patienceS: PATIENCE_S }), setTried);
  };
  /** What the ranks were sent, and will not be used, is freed now rather than in ten minutes. */
  const drop = (): void => {
    if (tried && !done) void del("/api/v1/jobs/{job}/edits/{edit}", { path: { job, edit: tried.id } }).catch(() => undefined);
    setTried(null);
  };
  const close = (): void => {
    drop();
    onClose();
  };
  const action = tried ? `Load it: change ${sizeText(tried)}` : "Dry run";
  return (
    <Question title={`Load step ${count(one.step)} into the running training?`} action={done ? "Loaded" : action} leave={done ? "Close" : "Cancel"} danger={tried !== null} disabled={done !== null} sending={sending} onGo={go} onClose={close}>
      <p>
        All parameters become what they are in <code>{one.destination}</code>: on all ranks at one step, or on none. Buffers stay as they are. Training is at step {count(live.step)} and continues from there. It can be undone.
      </p>
      {!done && <Tick label="also zero the optimizer's state" checked={reset} onChange={(checked) => (setReset(checked), drop())} />}
      {sending.busy && <p className="faint" role="status">{tried ? "Waits for all ranks to reach one step …" : "Reads the files, sends them to the ranks and compares …"}</p>}
      {tried && !done && (
        <>
          <p role="status">DRY RUN: nothing has changed yet. {sizeText(tried)} would change:</p>
          <BeforeAfter before={tried.before} after={tried.after} />
        </>
      )}
      {done && <p role="status">Loaded on all ranks at step {count(done.step)}. The log of edits has it, and can undo it.</p>}
    </Question>
  );
}
