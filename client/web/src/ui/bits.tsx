/** Small components shared by all views. */

import { type ReactNode, useEffect, useRef, useState } from "react";

import { clock, duration, halves } from "../lib/format";
import { useNow, usePlace } from "./hooks";
import { useOutage } from "./outage";

/** The origin of the numbers and their age. */
export function Source(props: {
  what: string;
  at: number;
  step?: number | undefined;
  incarnation?: number | undefined;
  error?: string | null | undefined;
  busy?: boolean | undefined;
  refresh?: (() => void) | undefined;
}): ReactNode {
  const now = useNow();
  const { what, at, step, incarnation, error, busy, refresh } = props;
  const age = at ? Math.max(0, (Math.max(now, at) - at) / 1000) : 0;
  const old = at > 0 && error;
  const isPath = what.startsWith("/");
  return (
    <span className={`source${error ? " bad" : ""}`}>
      {isPath ? <Curl path={what} /> : <span className="what">{what}</span>}
      {at > 0 && (
        <span title={clock(at / 1000)}>
          {old ? "last updated " : ""}
          {age < 1.5 ? "now" : `${duration(Math.round(age))} ago`}
        </span>
      )}
      {at === 0 && !error && <span>{busy ? "loading …" : "not loaded"}</span>}
      {step !== undefined && step >= 0 && <span>step {step.toLocaleString("en-US")}</span>}
      {incarnation !== undefined && incarnation >= 0 && <span>run {incarnation}</span>}
      {refresh && (
        <button type="button" className="quiet" onClick={refresh} aria-label="Reload" title="Reload">
          ↻
        </button>
      )}
    </span>
  );
}

/** An error, usually the server's own text. That the control plane does not answer is said once, above. */
export function Trouble(props: { children: ReactNode }): ReactNode {
  const outage = useOutage();
  if (outage && props.children === outage) return null;
  return (
    <p className="trouble" role="alert">
      {props.children}
    </p>
  );
}

export function Empty(props: { children: ReactNode }): ReactNode {
  return <p className="empty">{props.children}</p>;
}

export type Tone = "ok" | "warn" | "bad" | "mute" | "info";

const TONES: Record<string, Tone> = {
  ok: "ok",
  starting: "info",
  degraded: "warn",
  down: "bad",
  finished: "mute",
  ended: "mute",
  firing: "bad",
  resolved: "mute",
  warning: "warn",
  critical: "bad",
  APPLIED: "ok",
  DONE: "ok",
  STAGING: "info",
  STAGED: "info",
  COMMITTED: "info",
  PLANNED: "info",
  RUNNING: "info",
  VERIFYING: "info",
  ABORTED: "mute",
  CANCELLED: "mute",
  FAILED: "bad",
  LOST: "bad",
  running: "ok",
  paused: "warn",
  pausing: "info",
  stepping: "info",
};

export function toneOf(state: string): Tone {
  return TONES[state] ?? "mute";
}

export function Badge(props: { state: string; tone?: Tone }): ReactNode {
  const { state, tone } = props;
  return <span className={`badge ${tone ?? toneOf(state)}${state === "DRY RUN" ? " as-is" : ""}`}>{state}</span>;
}

/** Paths that are not of one job. */
const GLOBAL = /^\/(jobs\/|metrics|tokens|destinations|audit)/;

/** The question behind the numbers, to be asked in a shell. */
function Curl(props: { path: string }): ReactNode {
  const place = usePlace();
  const [copied, setCopied] = useState(false);
  const own = GLOBAL.test(props.path) ? props.path : `/jobs/${encodeURIComponent(place.job)}${props.path}`;
  const url = `${window.location.origin}${own === "/metrics" ? "" : "/api/v1"}${own}`;
  const text = `curl -H "Authorization: Bearer $PARAMD_TOKEN" '${url}'`;
  return (
    <button type="button" className="quiet" title={copied ? "Copied" : `Copy as curl: ${text}`} aria-label={`Copy as curl: ${own}`} onClick={() => void navigator.clipboard?.writeText(text).then(() => setCopied(true))}>
      {copied ? (
        "✓"
      ) : (
        <svg width="12" height="12" viewBox="0 0 12 12" fill="none" stroke="currentColor" aria-hidden>
          <rect x="0.8" y="3.2" width="7.5" height="8" rx="1.2" />
          <path d="M4 3V1.8A1 1 0 0 1 5 .8h5.2a1 1 0 0 1 1 1V7.6a1 1 0 0 1-1 1H8.6" />
        </svg>
      )}
    </button>
  );
}

/** A line to be copied whole. */
export function Line(props: { children: string }): ReactNode {
  const [copied, setCopied] = useState(false);
  return (
    <span className="line">
      <code className="wrap">{props.children}</code>
      <button type="button" className="small" onClick={() => void navigator.clipboard?.writeText(props.children).then(() => setCopied(true))}>
        {copied ? "Copied" : "Copy"}
      </button>
    </span>
  );
}

/** Several lines to be copied whole. */
export function Snippet(props: { label: string; children: string }): ReactNode {
  const [copied, setCopied] = useState(false);
  return (
    <div className="snippet">
      <pre className="log" tabIndex={0} role="region" aria-label={props.label}>
        {props.children}
      </pre>
      <button type="button" className="small" onClick={() => void navigator.clipboard?.writeText(props.children).then(() => setCopied(true))}>
        {copied ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

/** An untrusted name: plain text, isolated from the surrounding text direction; cut in its middle. */
export function Name(props: { children: string; className?: string }): ReactNode {
  const { children, className = "" } = props;
  const [head, tail] = className.includes("wrap") ? [children, ""] : halves(children);
  return (
    <bdi className={`name ${tail ? "cut" : ""} ${className}`} title={children}>
      {tail ? (
        <>
          <span>{head}</span>
          <span>{tail}</span>
        </>
      ) : (
        children
      )}
    </bdi>
  );
}

export function Panel(props: {
  title: ReactNode;
  source?: ReactNode;
  actions?: ReactNode;
  children: ReactNode;
  className?: string;
}): ReactNode {
  return (
    <section className={`panel ${props.className ?? ""}`}>
      <header>
        <h2>{props.title}</h2>
        {props.actions && <div className="actions">{props.actions}</div>}
        {props.source}
      </header>
      {props.children}
    </section>
  );
}

/** Label and value pairs; few that matter most are large. */
export function Facts(props: { rows: [string, ReactNode][]; large?: boolean }): ReactNode {
  return (
    <dl className={props.large ? "facts large" : "facts"}>
      {props.rows.map(([label, value]) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Choice<T extends string>(props: {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}): ReactNode {
  const { label, value, options, onChange } = props;
  return (
    <div className="choice" role="group" aria-label={label}>
      {options.map(([each, shown]) => (
        <button
          key={each}
          type="button"
          aria-pressed={each === value}
          onClick={() => onChange(each)}
        >
          {shown}
        </button>
      ))}
    </div>
  );
}

/** A native modal dialog: focus stays inside, Escape closes it. */
export function Dialog(props: {
  title: string;
  onClose: () => void;
  children: ReactNode;
}): ReactNode {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    ref.current?.showModal();
  }, []);
  return (
    <dialog ref={ref} onClose={props.onClose} aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        <button type="button" className="quiet" onClick={() => ref.current?.close()} aria-label="Close">
          ✕
        </button>
      </header>
      {props.children}
    </dialog>
  );
}

/** A sparkline; decorative, next to the number as text. */
export function Spark(props: { values: readonly (number | null)[]; width?: number }): ReactNode {
  const { values, width = 90 } = props;
  const known = values.filter((v): v is number => v !== null && Number.isFinite(v));
  if (known.length < 2) return <svg className="spark" width={width} height={18} aria-hidden />;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  let path = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null || !Number.isFinite(value)) {
      pen = "M";
      return;
    }
    const x = (i / Math.max(1, values.length - 1)) * (width - 2) + 1;
    path += `${pen}${x.toFixed(1)} ${(16 - ((value - low) / span) * 14).toFixed(1)}`;
    pen = "L";
  });
  return (
    <svg className="spark" width={width} height={18} aria-hidden>
      <path d={path} fill="none" stroke="currentColor" strokeWidth="1.2" />
    </svg>
  );
}

export function Bar(props: { share: number; tone?: Tone; label: string }): ReactNode {
  const share = Math.min(1, Math.max(0, props.share));
  return (
    <meter
      className={`bar ${props.tone ?? "info"}`}
      min={0}
      max={1}
      value={share}
      aria-label={props.label}
    />
  );
}
