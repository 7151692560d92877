/** Turns the edit form into requests; texts of edits and leases. Pure. */

import type { Edit, EditRequest, OpRequest } from "../api/schema";

/** Operations without tensor data; the others need `paramd edit --from`. */
export const OPS = ["mul", "add", "fill", "clamp"] as const;
export type Op = (typeof OPS)[number];

/** What each operation takes. */
export const FIELDS: Record<Op, readonly ("value" | "min" | "max")[]> = {
  mul: ["value"],
  add: ["value"],
  fill: ["value"],
  clamp: ["min", "max"],
};

export const MEANING: Record<Op, string> = {
  mul: "multiply by the value",
  add: "add the value",
  fill: "set every element to the value",
  clamp: "limit to [min, max]",
};

export interface Draft {
  pattern: string;
  op: Op;
  value: string;
  min: string;
  max: string;
  ifStep: string;
  note: string;
  allowNonfinite: boolean;
  resetMoments: boolean;
}

export const EMPTY: Draft = {
  pattern: "",
  op: "mul",
  value: "",
  min: "",
  max: "",
  ifStep: "",
  note: "",
  allowNonfinite: false,
  resetMoments: false,
};

const NONFINITE = new Map([
  ["nan", "nan"],
  ...["inf", "+inf", "infinity"].map((text) => [text, "inf"] as const),
  ...["-inf", "-infinity"].map((text) => [text, "-inf"] as const),
]);

/** How long the server may wait for the edit to end. */
const WAIT_S = 30;

/** The request for a draft, or what is wrong with the draft. */
export function bodyOf(draft: Draft, id: string, dryRun: boolean): { body: EditRequest } | { problem: string } {
  if (!draft.pattern.trim()) return { problem: "parameters: expected a name or a glob" };
  const op: OpRequest = { pattern: draft.pattern.trim(), op: draft.op, data: false };
  for (const field of FIELDS[draft.op]) {
    const text = draft[field].trim();
    if (text === "" && draft.op === "clamp") continue;
    const special = NONFINITE.get(text.toLowerCase());
    const value = Number(text);
    if (special && field === "value") {
      if (!draft.allowNonfinite) return { problem: `value: ${text}; tick "allow NaN and Inf" to write it` };
      // JSON has neither: the server takes them as text.
      op.value = special as unknown as number;
      continue;
    }
    if (text === "" || !Number.isFinite(value)) return { problem: `${field}: expected a number` };
    op[field] = value;
  }
  if (draft.op === "clamp" && op.min === undefined && op.max === undefined) {
    return { problem: "min or max: expected a number for one of them" };
  }
  const step = draft.ifStep.trim() ? Number(draft.ifStep) : null;
  if (step !== null && (!Number.isInteger(step) || step < 0)) {
    return { problem: "only at step: expected a whole number" };
  }
  return {
    body: {
      id,
      ops: [op],
      if_step: step,
      allow_nonfinite: draft.allowNonfinite,
      reset_moments: draft.resetMoments,
      note: draft.note.trim(),
      dry_run: dryRun,
      wait_s: WAIT_S,
    },
  };
}

/** 32 hexadecimal digits; makes a repeated request idempotent. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An operation in words. */
export function opText(op: {
  op: string;
  value?: unknown;
  weight?: unknown;
  min?: unknown;
  max?: unknown;
  data?: unknown;
}): string {
  const parts = (["value", "weight", "min", "max"] as const)
    .filter((key) => op[key] !== null && op[key] !== undefined)
    .map((key) => (key === "value" ? String(op[key]) : `${key} ${String(op[key])}`));
  return [op.op, ...parts, op.data ? "data" : ""].filter(Boolean).join(" ");
}

/** Edits that changed a parameter, or the whole training; of those of many tensors not all names are told. */
export function editsOf(name: string, all: readonly Edit[]): Edit[] {
  const touches = (edit: Edit): boolean => edit.rollback !== null || edit.ops.some((op) => op.names.includes(name));
  return all.filter((edit) => edit.state === "APPLIED" && !edit.dry_run && touches(edit));
}

type Past = Pick<Edit, "id" | "incarnation" | "state" | "step" | "created_s" | "undone_by" | "rollback">;

/** Applied edits that a later rollback went back before: training goes on without them. */
export function discardedOf(all: readonly Past[]): ReadonlySet<string> {
  const backs = all.filter((edit) => edit.state === "APPLIED" && edit.rollback && !edit.undone_by);
  const gone = all.filter(
    (edit) =>
      edit.state === "APPLIED" &&
      backs.some((back) => back.incarnation === edit.incarnation && back.created_s > edit.created_s && back.rollback!.step < edit.step),
  );
  return new Set(gone.map((edit) => edit.id));
}

/** Seconds left of a lease now. */
export function leaseLeft(leaseLeftS: number | null | undefined, answeredAtMs: number, nowMs: number): number {
  return Math.max(0, (leaseLeftS ?? 0) - Math.max(0, nowMs - answeredAtMs) / 1000);
}

/** What is to be said of an edit that was sent: nothing once it is applied, when `done` is called. */
export function endOf(edit: Edit, done: () => void): string {
  if (edit.state !== "APPLIED") return edit.reason || `It is ${edit.state}; the log below tells how it ends.`;
  done();
  return "";
}
