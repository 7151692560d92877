/** Learning rates and other hyper-parameters: seen, and set on all ranks at one step. */

import { type ReactNode, useState } from "react";

import { get, post } from "../api/client";
import type { GroupDocument } from "../api/schema";
import { newId } from "../lib/edits";
import { words } from "../lib/format";
import { Dialog, Empty, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { textOf } from "../ui/problems";

const FIRST = ["lr", "weight_decay", "betas", "momentum", "eps"];

/** What is shown of a group: numbers, the learning rate first. */
export function shownOf(values: Readonly<Record<string, unknown>>): [string, string][] {
  const numbers = Object.entries(values).filter(([, value]) => typeof value === "number" || (Array.isArray(value) && value.every((one) => typeof one === "number")));
  const place = (name: string): number => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return numbers.sort(([a], [b]) => place(a) - place(b)).map(([name, value]) => [name, words(value)]);
}

/** A typed value: a number, or several with commas where there is a tuple; null: neither. */
export function valueOf(text: string): number | number[] | null {
  const found = text.split(",").map((part) => (part.trim() === "" ? Number.NaN : Number(part)));
  if (found.some((one) => !Number.isFinite(one))) return null;
  return found.length === 1 ? found[0]! : found;
}

export function Rates(): ReactNode {
  const { job, live } = useShared();
  const mayRead = useMay("read");
  const mayEdit = useMay("edit");
  const [setting, setSetting] = useState<GroupDocument | null>(null);
  const found = usePoll(
    mayRead ? `${job} rates` : null,
    (signal) => get("/api/v1/jobs/{job}/hyperparameters", { path: { job }, signal }),
    0,
    live.changes["edit"] ?? 0,
  );
  const groups = found.data?.groups ?? [];
  return (
    <Panel title="Learning rates" source={<Source what="/hyperparameters" at={found.at} step={found.data?.step} error={found.error} busy={found.busy} refresh={mayRead ? found.refresh : undefined} />}>
      {found.error && <p className="faint wrap">Not known: {found.error}</p>}
      {!mayRead && <Empty>Needs a reader's token.</Empty>}
      {mayRead && !found.data && !found.error && <Empty>Asks rank 0 at its next step …</Empty>}
      {groups.length > 0 && (
        <div className="scroll">
          <table className="plain" aria-label="Parameter groups">
            <thead>
              <tr>
                <th>group</th>
                <th>values</th>
                <th>do</th>
              </tr>
            </thead>
            <tbody>
              {groups.map((one) => (
                <tr key={`${one.optimizer} ${one.group}`}>
                  <td>
                    {one.group} of optimizer {one.optimizer}
                  </td>
                  <td className="wrap">
                    {shownOf(one.values).map(([name, text]) => (
                      <span key={name} className="spaced">
                        <span className="faint">{name}</span> <code>{text}</code>
                      </span>
                    ))}
                  </td>
                  <td>
                    {mayEdit && (
                      <button type="button" className="small" onClick={() => setSetting(one)}>
                        Set …
                      </button>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {setting && <Setting group={setting} onClose={() => setSetting(null)} onDone={found.refresh} />}
    </Panel>
  );
}

function Setting(props: { group: GroupDocument; onClose: () => void; onDone: () => void }): ReactNode {
  const { group, onClose, onDone } = props;
  const { job } = useShared();
  const shown = shownOf(group.values);
  const [name, setName] = useState(shown[0]?.[0] ?? "lr");
  const [text, setText] = useState(shown[0]?.[1] ?? "");
  const [note, setNote] = useState("");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const before = shown.find(([one]) => one === name)?.[1] ?? "";
  const value = valueOf(text);
  const apply = (): void => {
    if (value === null) return;
    setBusy(true);
    setProblem("");
    post("/api/v1/jobs/{job}/hyperparameters", { path: { job }, body: { id: newId(), optimizer: group.optimizer, group: group.group, values: { [name]: value }, note, wait_s: 30 } })
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
    <Dialog title={`Set a value of group ${group.group}?`} onClose={onClose}>
      <div className="form">
        <label className="field">
          Name
          <select
            value={name}
            onChange={(event) => {
              setName(event.target.value);
              setText(shown.find(([one]) => one === event.target.value)?.[1] ?? "");
            }}
          >
            {shown.map(([one]) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <label className="field">
          Value
          <input type="text" name="rate" inputMode="decimal" value={text} onChange={(event) => setText(event.target.value)} />
        </label>
        <label className="field full">
          Note for the log
          <input type="text" maxLength={1000} value={note} onChange={(event) => setNote(event.target.value)} />
        </label>
      </div>
      <p>
        {name}: {before} → <strong>{value === null ? "?" : words(value)}</strong>, on all ranks at one step. A scheduler of the script may set it again. It can be undone.
      </p>
      {value === null && <p className="faint">Expected a number, or numbers with commas.</p>}
      {problem && <Trouble>{problem}</Trouble>}
      <div className="foot">
        <button type="button" onClick={onClose}>
          Cancel
        </button>
        <button type="button" className="danger" disabled={busy || value === null || text === before} onClick={apply}>
          Set {name}
        </button>
      </div>
    </Dialog>
  );
}
