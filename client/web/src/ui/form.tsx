/** What every form has: one request at a time, what came of it, and a question before it. */

import { type ReactNode, useState } from "react";

import { Dialog, Trouble } from "./bits";
import { textOf } from "./problems";

export interface Sending {
  busy: boolean;
  /** Why the last one failed; empty: it did not. */
  problem: string;
  /** Sends one; `then` is called with the answer, and may say what is wrong with it. */
  send: <T>(sent: Promise<T>, then?: (found: T) => string | void) => void;
  say: (problem: string) => void;
}

export function useSending(): Sending {
  const [busy, setBusy] = useState(false);
  const [problem, say] = useState("");
  const send = <T,>(sent: Promise<T>, then?: (found: T) => string | void): void => {
    setBusy(true);
    say("");
    sent
      .then((found) => say(then?.(found) || ""))
      .catch((error: unknown) => say(textOf(error)))
      .finally(() => setBusy(false));
  };
  return { busy, problem, send, say };
}

export function Field(props: { label: ReactNode; wide?: "broad" | "full"; children: ReactNode }): ReactNode {
  return (
    <label className={`field ${props.wide ?? ""}`}>
      {props.label}
      {props.children}
    </label>
  );
}

/** A text; with `min` a whole number, which is empty while it is none. */
export function Text(props: { label: ReactNode; value: string; onChange: (value: string) => void; name?: string; wide?: "broad" | "full"; mono?: boolean; numeric?: boolean; min?: number; max?: number; placeholder?: string; required?: boolean }): ReactNode {
  const { label, value, onChange, wide, mono, numeric, min, max, ...rest } = props;
  return (
    <Field label={label} {...(wide ? { wide } : {})}>
      <input type={min === undefined ? "text" : "number"} min={min} className={mono ? "mono" : ""} spellCheck={!mono} inputMode={numeric ? "decimal" : "text"} maxLength={max} value={value} onChange={(event) => onChange(event.target.value)} {...rest} />
    </Field>
  );
}

/** A choice among values, each with a text for people. */
export function Select(props: { label: ReactNode; value: string; options: readonly (readonly [string, string])[]; onChange: (value: string) => void; name?: string; wide?: "broad" | "full" }): ReactNode {
  return (
    <Field label={props.label} {...(props.wide ? { wide: props.wide } : {})}>
      <select name={props.name} value={props.value} onChange={(event) => props.onChange(event.target.value)}>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </Field>
  );
}

/** A choice in a line of text. */
export function Pick(props: { label: string; value: string; options: readonly [string, string][]; onPick: (value: string) => void }): ReactNode {
  const { label, value, options, onPick } = props;
  const known = options.some(([each]) => each === value);
  return (
    <label className="tick">
      {label}
      <select name={label} value={value} onChange={(event) => onPick(event.target.value)}>
        {!known && <option value={value}>{value}</option>}
        {options.map(([each, shown]) => (
          <option key={each} value={each}>
            {shown}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Tick(props: { label: string; checked: boolean; onChange: (checked: boolean) => void }): ReactNode {
  return (
    <label className="tick">
      <input type="checkbox" checked={props.checked} onChange={(event) => props.onChange(event.target.checked)} />
      {props.label}
    </label>
  );
}

/** A dialog that does one thing, or nothing. */
export function Question(props: {
  title: string;
  /** What its button says. */
  action: string;
  onGo: () => void;
  onClose: () => void;
  sending: Pick<Sending, "busy" | "problem">;
  /** Destructive: Cancel has the focus. */
  danger?: boolean;
  disabled?: boolean;
  why?: string;
  leave?: string;
  beside?: ReactNode;
  children: ReactNode;
}): ReactNode {
  const { sending, danger = false } = props;
  return (
    <Dialog title={props.title} onClose={props.onClose}>
      {props.children}
      {sending.problem && <Trouble>{sending.problem}</Trouble>}
      <div className="foot">
        {props.beside}
        <button type="button" onClick={props.onClose} autoFocus={danger}>
          {props.leave ?? "Cancel"}
        </button>
        <button type="button" className={danger ? "danger" : "main"} title={props.why} disabled={sending.busy || props.disabled} onClick={props.onGo}>
          {props.action}
        </button>
      </div>
    </Dialog>
  );
}
