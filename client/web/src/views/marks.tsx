/** The states that training can be put back to: mark one, roll back to one, forget one. */

import { type ReactNode, useState } from "react";

import { del, get, post } from "../api/client";
import type { Mark } from "../api/schema";
import { newId } from "../lib/edits";
import { bytes, clock, count, plural } from "../lib/format";
import { Dialog, Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { textOf } from "../ui/problems";
import { whyNoMark } from "./keep";

/** A mark's own key; standing snapshots have no name. */
const keyOf = (mark: Mark): string => `${mark.name} ${mark.step}`;

export function Marks(props: { mayEdit: boolean }): ReactNode {
  const { job, live } = useShared();
  const [name, setName] = useState("");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const [going, setGoing] = useState("");
  const [forgetting, setForgetting] = useState("");
  const path = { job };
  const marks = usePoll(
    `${job} marks`,
    (signal) => get("/api/v1/jobs/{job}/marks", { path, signal }),
    10_000,
    (live.changes["mark"] ?? 0) + (live.changes["edit"] ?? 0),
  );
  const act = (sent: Promise<unknown>): void => {
    setBusy(true);
    setProblem("");
    sent
      .then(() => setName(""))
      .catch((error: unknown) => setProblem(textOf(error)))
      .finally(() => {
        setBusy(false);
        marks.refresh();
      });
  };
  const all = marks.data?.marks ?? [];
  const why = whyNoMark(marks.data?.marks ?? null);
  const chosen = all.find((mark) => keyOf(mark) === going);
  const leaving = all.find((mark) => mark.name !== "" && mark.name === forgetting);
  return (
    <Panel
      title="Restore points"
      source={<Source what={`/jobs/${job}/marks`} at={marks.at} error={marks.error} busy={marks.busy} refresh={marks.refresh} />}
    >
      {marks.error && <Trouble>{marks.error}</Trouble>}
      {problem && <Trouble>{problem}</Trouble>}
      {props.mayEdit && (
        <form
          className="actions"
          onSubmit={(event) => {
            event.preventDefault();
            act(post("/api/v1/jobs/{job}/marks", { path, body: { name: name.trim() } }));
          }}
        >
          <input aria-label="Name of the restore point" placeholder="name of the restore point" maxLength={64} value={name} onChange={(event) => setName(event.target.value)} />
          <button type="submit" title={why} disabled={busy || why !== "" || !name.trim()}>
            Create restore point
          </button>
          <span className="faint why">{why || "in the sidecars' memory; training pauses while it is copied"}</span>
        </form>
      )}
      {!marks.data && !marks.error && <Empty>Loading …</Empty>}
      {marks.data && all.length === 0 && <Empty>Nothing is kept.</Empty>}
      {all.length > 0 && (
        <div className="scroll">
          <table className="plain roomy" aria-label="Restore points">
            <thead>
              <tr>
                <th>name</th>
                <th className="num">step</th>
                <th className="num">size</th>
                <th>when</th>
                <th>who</th>
                <th>do</th>
              </tr>
            </thead>
            <tbody>
              {[...all].reverse().map((mark) => (
                <tr key={keyOf(mark)} data-mark={mark.name || `step ${mark.step}`}>
                  <td>
                    {mark.name ? <Name>{mark.name}</Name> : <span className="faint">automatic</span>}
                    {!mark.whole && <div className="faint wrap">{mark.reason}</div>}
                  </td>
                  <td className="num">{mark.step >= 0 ? count(mark.step) : "–"}</td>
                  <td className="num">{bytes(mark.size_bytes)}</td>
                  <td>{mark.made_s === null ? "–" : clock(mark.made_s)}</td>
                  <td>{mark.by ? <Name>{mark.by}</Name> : "–"}</td>
                  <td>
                    {props.mayEdit && (
                      <div className="actions">
                        {mark.whole && (
                          <button type="button" className="small" disabled={busy} onClick={() => setGoing(keyOf(mark))}>
                            Roll back …
                          </button>
                        )}
                        {mark.name && (
                          <button type="button" className="small" disabled={busy} onClick={() => setForgetting(mark.name)}>
                            Forget …
                          </button>
                        )}
                      </div>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {chosen && <RollBack mark={chosen} onClose={() => setGoing("")} onDone={marks.refresh} />}
      {leaving && (
        <Dialog title={`Forget restore point ${leaving.name}?`} onClose={() => setForgetting("")}>
          <p>
            Its {bytes(leaving.size_bytes)} of memory are given back, and training cannot go back to step {count(leaving.step)} by it any more.
          </p>
          <div className="foot">
            <button type="button" onClick={() => setForgetting("")} autoFocus>
              Cancel
            </button>
            <button
              type="button"
              className="danger"
              disabled={busy}
              onClick={() => {
                setForgetting("");
                act(del("/api/v1/jobs/{job}/marks/{mark}", { path: { job, mark: leaving.name } }));
              }}
            >
              Forget it
            </button>
          </div>
        </Dialog>
      )}
    </Panel>
  );
}

/** The question before a rollback: what is lost by it. */
function RollBack(props: { mark: Mark; onClose: () => void; onDone: () => void }): ReactNode {
  const { mark, onClose, onDone } = props;
  const { job, live } = useShared();
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const [note, setNote] = useState("");
  const steps = Math.max(0, live.step - mark.step);
  const target = mark.name ? { mark: mark.name } : { step: mark.step };
  const go = (): void => {
    setBusy(true);
    setProblem("");
    post("/api/v1/jobs/{job}/rollback", { path: { job }, body: { id: newId(), ...target, note, wait_s: 60 } })
      .then((edit) => {
        onDone();
        if (edit.state === "APPLIED") return onClose();
        setProblem(edit.reason || `It is ${edit.state}; the log below tells how it ends.`);
        setBusy(false);
      })
      .catch((error: unknown) => {
        setProblem(textOf(error));
        setBusy(false);
      });
  };
  return (
    <Dialog title={`Put training back to step ${count(mark.step)}?`} onClose={onClose}>
      <p>
        Parameters, optimizer state, hyper-parameters and everything in keep become what they were
        {mark.name ? ` at restore point ${mark.name}` : ""}, on all ranks or on none.{" "}
        <strong>
          {steps > 0 ? `${plural(steps, "update")} since, with every edit made since, ${steps === 1 ? "is" : "are"} discarded` : "What was done since is discarded"}
        </strong>
        ; training continues from step {count(mark.step)}. Undoing the rollback goes forward to them, as long as no other rollback follows.
      </p>
      <label>
        note <input aria-label="Note" maxLength={1000} value={note} onChange={(event) => setNote(event.target.value)} />
      </label>
      {problem && <Trouble>{problem}</Trouble>}
      <div className="foot">
        <button type="button" onClick={onClose} autoFocus>
          Cancel
        </button>
        <button type="button" className="danger" disabled={busy} onClick={go}>
          Roll back to step {count(mark.step)}
        </button>
      </div>
    </Dialog>
  );
}
