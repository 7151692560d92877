/** One list of what happened to a job: edits, marks, exports, restarts, alerts, pauses. Pure. */

import type { Edit, ExportInfo, IncarnationRecord, Mark } from "../api/schema";
import { type Cause } from "./causes";
import { opText } from "./edits";
import { count, duration, holderText, plural } from "./format";
import type { Live } from "./live";

export const KINDS = ["edit", "mark", "export", "restart", "alert", "pause"] as const;
export type Kind = (typeof KINDS)[number];

export interface Happening {
  key: string;
  kind: Kind;
  /** Unix time in seconds. */
  time_s: number;
  /** -1: not known. */
  step: number;
  incarnation: number;
  who: string;
  what: string;
  state: string;
  /** Place in the page that says more. */
  view: "edits" | "exports" | "runs" | "alerts";
  query: Readonly<Record<string, string>>;
}

export interface Sources {
  edits: readonly Edit[];
  marks: readonly Mark[];
  exports: readonly ExportInfo[];
  incarnations: readonly IncarnationRecord[];
  causes: readonly Cause[];
  recent: Live["recent"];
}

/** Newest first. */
export function timelineOf(sources: Sources): Happening[] {
  return [
    ...sources.edits.filter((edit) => !edit.dry_run).map(ofEdit),
    ...sources.marks.flatMap(ofMark),
    ...sources.exports.map(ofExport),
    ...sources.incarnations.flatMap((one) => ofIncarnation(one, lastStepBefore(one, sources.incarnations))),
    ...sources.causes.map(ofCause),
    ...ofPauses(sources.recent),
  ].sort((a, b) => b.time_s - a.time_s);
}

function ofEdit(edit: Edit): Happening {
  return {
    key: `edit ${edit.id}`,
    kind: "edit",
    time_s: edit.created_s,
    step: edit.step,
    incarnation: edit.incarnation,
    who: edit.actor,
    what: `${edit.undo_of ? `undoes ${edit.undo_of.slice(0, 8)}` : editText(edit)}${edit.note ? `: ${edit.note}` : ""}`,
    state: edit.undone_by ? "undone" : edit.state,
    view: "edits",
    query: { edit: edit.id },
  };
}

/** An edit on one line: its operations with the patterns as they were asked for. */
export function editText(edit: Edit): string {
  if (edit.rollback) {
    return `rolls back to ${edit.rollback.mark ? `restore point ${edit.rollback.mark}, ` : ""}step ${count(edit.rollback.step)}`;
  }
  if (edit.hyperparameters) {
    const { optimizer, group, values } = edit.hyperparameters;
    const set = Object.entries(values).map(([name, value]) => `${name} = ${Array.isArray(value) ? value.join(", ") : String(value)}`);
    return `sets ${set.join("; ")} in group ${group} of optimizer ${optimizer}`;
  }
  const parts = new Map<string, Set<string>>();
  for (const op of edit.ops) {
    const text = opText(op);
    parts.set(text, (parts.get(text) ?? new Set()).add(op.pattern));
  }
  return [...parts]
    .map(([text, patterns]) => {
      const [first, ...rest] = [...patterns];
      return `${text} ${first}${rest.length ? ` and ${count(rest.length)} more` : ""}`;
    })
    .join(", ");
}

/** Tensors and elements that an edit changes. */
export function sizeOf(edit: Edit): { tensors: number; elements: number } {
  return {
    tensors: edit.ops.reduce((sum, op) => sum + op.name_count, 0),
    elements: edit.ops.reduce((sum, op) => sum + op.numel, 0),
  };
}

function ofMark(mark: Mark): Happening[] {
  if (!mark.name || mark.made_s === null) return [];
  const place = { incarnation: -1, view: "edits" as const, query: {} };
  return [{ ...place, key: `mark ${mark.name}`, kind: "mark", time_s: mark.made_s, step: mark.step, who: mark.by, what: mark.name, state: mark.whole ? "kept" : "not whole" }];
}

function ofExport(one: ExportInfo): Happening {
  return {
    key: `export ${one.id}`,
    kind: "export",
    time_s: one.created_s,
    step: one.step,
    incarnation: one.incarnation,
    who: one.actor,
    what: `to ${one.destination}${one.reason ? `: ${one.reason}` : ""}`,
    state: one.state,
    view: "exports",
    query: { export: one.id },
  };
}

/** Last step of the run before this one; -1 if it is not known. */
function lastStepBefore(run: IncarnationRecord, all: readonly IncarnationRecord[]): number {
  return all.find((one) => one.incarnation === run.incarnation - 1)?.step ?? -1;
}

/** `began_step` is where the run is drawn: it goes on from there, or from a snapshot shortly before. */
function ofIncarnation(one: IncarnationRecord, began_step: number): Happening[] {
  const shared = { kind: "restart" as const, incarnation: one.incarnation, who: "", view: "runs" as const, query: {} };
  const began: Happening = {
    ...shared,
    key: `begin ${one.incarnation}`,
    time_s: one.began_s,
    step: began_step,
    what: `run ${one.incarnation} began with ${plural(one.world_size, "rank")}`,
    state: "began",
  };
  if (one.ended_s === null) return [began];
  return [
    began,
    {
      ...shared,
      key: `end ${one.incarnation}`,
      time_s: one.ended_s,
      step: one.step,
      what: `run ${one.incarnation} ended${one.reason ? `: ${one.reason}` : ""}`,
      state: "ended",
    },
  ];
}

function ofCause(cause: Cause): Happening {
  const others = cause.alerts.length - 1;
  return {
    key: `alert ${cause.id}`,
    kind: "alert",
    time_s: cause.first.first_seen_s,
    step: -1,
    incarnation: cause.first.incarnation,
    who: "",
    what: `${cause.first.reason}${others ? `, then ${count(others)} more` : ""}`,
    state: cause.firing ? cause.first.severity : "resolved",
    view: "alerts",
    query: { cause: cause.id },
  };
}

/** A pause is one line, from its first event to the one that ends it. */
function ofPauses(recent: Live["recent"]): Happening[] {
  const found: Happening[] = [];
  for (const event of [...recent].reverse().filter((one) => one.kind === "pause")) {
    const now = ofPause(event);
    const open = found.at(-1);
    if (!open || open.state === "running" || open.incarnation !== now.incarnation) {
      found.push(now);
      continue;
    }
    const ended = now.state === "running" ? `training for ${duration(now.time_s - open.time_s)}` : open.what;
    found[found.length - 1] = { ...open, state: now.state, step: Math.max(open.step, now.step), who: open.who || now.who, what: ended };
  }
  return found.map((one) => (one.state === "running" ? { ...one, state: "resumed" } : one));
}

function ofPause(event: Live["recent"][number]): Happening {
  const text = (name: string): string => (typeof event.data[name] === "string" ? (event.data[name] as string) : "");
  const step = event.data["step"];
  const incarnation = event.data["incarnation"];
  return {
    key: `pause ${event.id}`,
    kind: "pause",
    time_s: event.time_s,
    step: typeof step === "number" ? step : -1,
    incarnation: typeof incarnation === "number" ? incarnation : -1,
    who: holderText(text("holder")),
    what: "training",
    state: text("state") || "changed",
    view: "edits",
    query: {},
  };
}

/** Share of a chart's width, or `least` if that is longer, that a name beside a line takes. */
const NAME_SHARE = 0.04;

/** Lines in a chart over `[begin, end]`; names that would overlap are told at the first one. */
export function linesOf(
  events: readonly Happening[],
  begin: number,
  end: number,
  place: (one: Happening) => number | null = (one) => one.time_s * 1000,
  least = 60_000,
): { name: string; xAxis: number }[] {
  const apart = NAME_SHARE * Math.max(end - begin, least);
  const lines = events
    .flatMap((one) => {
      const xAxis = place(one);
      return xAxis === null ? [] : [{ name: one.kind === "restart" ? `run ${one.incarnation}` : one.kind === "mark" ? "restore point" : (one.kind as string), xAxis }];
    })
    .filter((line) => line.xAxis >= begin && line.xAxis <= end)
    .sort((a, b) => a.xAxis - b.xAxis);
  let named = lines[0];
  for (const line of lines.slice(1)) {
    if (!named || line.xAxis - named.xAxis >= apart) {
      named = line;
      continue;
    }
    if (!named.name.split(", ").includes(line.name)) named.name += `, ${line.name}`;
    line.name = "";
  }
  return lines;
}

const MAX_DRAWN = 12;

/** What a chart over time marks: what changed the training, the newest ones. */
export function drawnOf(timeline: readonly Happening[]): Happening[] {
  const idle = ["ABORTED", "LOST", "STAGING", "STAGED", "FAILED", "CANCELLED"];
  return timeline
    .filter((one) => one.kind !== "alert" && one.kind !== "pause" && !idle.includes(one.state))
    .slice(0, MAX_DRAWN);
}
