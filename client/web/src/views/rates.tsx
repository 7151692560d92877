/** Learning rates and other hyper-parameters: seen, and set on all ranks at one step. */

import { type ReactNode, useState } from "react";

import { get, post } from "../api/client";
import type { GroupDocument } from "../api/schema";
import { endOf, newId } from "../lib/edits";
import { words } from "../lib/format";
import { Empty, Panel, Source } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { Question, Select, Text, useSending } from "../ui/form";
import { usePoll } from "../ui/hooks";

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
  const sending = useSending();
  const textFor = (wanted: string): string => shown.find(([one]) => one === wanted)?.[1] ?? "";
  const before = textFor(name);
  const value = valueOf(text);
  const apply = (): void => {
    if (value === null) return;
    const body = { id: newId(), optimizer: group.optimizer, group: group.group, values: { [name]: value }, note, wait_s: 30 };
    sending.send(post("/api/v1/jobs/{job}/hyperparameters", { path: { job }, body }), (edit) => {
      onDone();
      return endOf(edit, onClose);
    });
  };
  return (
    <Question title={`Set a value of group ${group.group}?`} action={`Set ${name}`} sending={sending} disabled={value === null || text === before} onGo={apply} onClose={onClose}>
      <div className="form">
        <Select
          label="Name"
          value={name}
          options={shown.map(([one]) => [one, one] as const)}
          onChange={(wanted) => {
            setName(wanted);
            setText(textFor(wanted));
          }}
        />
        <Text label="Value" name="rate" numeric value={text} onChange={setText} />
        <Text label="Note for the log" wide="full" max={1000} value={note} onChange={setNote} />
      </div>
      <p>
        {name}: {before} → <strong>{value === null ? "?" : words(value)}</strong>, on all ranks at one step. A scheduler of the script may set it again. It can be undone.
      </p>
      {value === null && <p className="faint">Expected a number, or numbers with commas.</p>}
    </Question>
  );
}
