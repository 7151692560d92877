/** The states that training can be put back to: make one, roll back to one, delete one. */

import { type ReactNode, useState } from "react";

import { del, get, post } from "../api/client";
import type { Mark } from "../api/schema";
import { endOf, newId } from "../lib/edits";
import { bytes, clock, count, plural } from "../lib/format";
import { Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared, whyDead } from "../ui/context";
import { Question, Text, useSending } from "../ui/form";
import { usePoll } from "../ui/hooks";
import { whyNoMark } from "./keep";

/** A mark's own key; standing snapshots have no name. */
const keyOf = (mark: Mark): string => `${mark.name} ${mark.step}`;

export function Marks(props: { mayEdit: boolean }): ReactNode {
  const { job, live, summary } = useShared();
  const [name, setName] = useState("");
  const { busy, problem, send } = useSending();
  const [going, setGoing] = useState("");
  const [forgetting, setForgetting] = useState("");
  const path = { job };
  const marks = usePoll(
    `${job} marks`,
    (signal) => get("/api/v1/jobs/{job}/marks", { path, signal }),
    10_000,
    (live.changes["mark"] ?? 0) + (live.changes["edit"] ?? 0),
  );
  const act = (sent: Promise<unknown>): void =>
    send(
      sent.finally(marks.refresh),
      () => setName(""),
    );
  const all = marks.data?.marks ?? [];
  const why = whyNoMark(marks.data?.marks ?? null);
  const chosen = all.find((mark) => keyOf(mark) === going);
  const leaving = all.find((mark) => mark.name !== "" && mark.name === forgetting);
  return (
    <Panel
      title="Restore points"
      source={<Source what={`/jobs/${job}/marks`} at={marks.at} error={marks.error} busy={marks.busy} refresh={marks.refresh} />}
    >
      {marks.error && (whyDead(summary) ? <Empty>They lay in the memory of the sidecars, which are gone.</Empty> : <Trouble>{marks.error}</Trouble>)}
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
                            Delete …
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
        <Question
          title={`Delete restore point ${leaving.name}?`}
          action="Delete it"
          danger
          sending={{ busy, problem: "" }}
          onClose={() => setForgetting("")}
          onGo={() => {
            setForgetting("");
            act(del("/api/v1/jobs/{job}/marks/{mark}", { path: { job, mark: leaving.name } }));
          }}
        >
          <p>
            Its {bytes(leaving.size_bytes)} of memory are freed, and training can no longer go back to step {count(leaving.step)}.
          </p>
        </Question>
      )}
    </Panel>
  );
}

/** The question before a rollback: what is lost by it. */
function RollBack(props: { mark: Mark; onClose: () => void; onDone: () => void }): ReactNode {
  const { mark, onClose, onDone } = props;
  const { job, live } = useShared();
  const sending = useSending();
  const [note, setNote] = useState("");
  const steps = Math.max(0, live.step - mark.step);
  const target = mark.name ? { mark: mark.name } : { step: mark.step };
  const go = (): void =>
    sending.send(post("/api/v1/jobs/{job}/rollback", { path: { job }, body: { id: newId(), ...target, note, wait_s: 60 } }), (edit) => {
      onDone();
      return endOf(edit, onClose);
    });
  return (
    <Question title={`Put training back to step ${count(mark.step)}?`} action={`Roll back to step ${count(mark.step)}`} danger sending={sending} onGo={go} onClose={onClose}>
      <p>
        Parameters, optimizer state, hyper-parameters and everything in extra_state become what they were
        {mark.name ? ` at restore point ${mark.name}` : ""}, on all ranks or on none.{" "}
        <strong>
          {steps > 0 ? `${plural(steps, "update")} since, with every edit made since, ${steps === 1 ? "is" : "are"} discarded` : "What was done since is discarded"}
        </strong>
        ; training continues from step {count(mark.step)}. Undoing the rollback goes forward to them, as long as no other rollback follows.
      </p>
      <Text label="Note" name="note" max={1000} value={note} onChange={setNote} />
    </Question>
  );
}
