/** Edits and holds as the page works with them. Pure. */

export const OPS = ["fill", "mul", "add", "set", "lerp", "clamp"] as const;
export type Op = (typeof OPS)[number];

/** What each operation takes. */
export const FIELDS: Record<Op, readonly ("value" | "weight" | "min" | "max")[]> = {
  fill: ["value"],
  mul: ["value"],
  add: ["value"],
  set: ["value"],
  lerp: ["value", "weight"],
  clamp: ["min", "max"],
};

export const MEANING: Record<Op, string> = {
  fill: "every element becomes the value",
  mul: "times the value",
  add: "plus the value",
  set: "every element becomes the value",
  lerp: "x + weight · (value − x)",
  clamp: "not below min, not above max",
};

export interface Draft {
  pattern: string;
  op: Op;
  value: string;
  weight: string;
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
  weight: "",
  min: "",
  max: "",
  ifStep: "",
  note: "",
  allowNonfinite: false,
  resetMoments: false,
};

export interface EditBody {
  id: string;
  ops: Record<string, unknown>[];
  if_step?: number;
  allow_nonfinite?: boolean;
  reset_moments?: boolean;
  note?: string;
  dry_run?: boolean;
  wait_s: number;
}

/** The request of a draft, or what is missing in it. */
export function bodyOf(draft: Draft, id: string, dryRun: boolean): { body: EditBody } | { problem: string } {
  if (!draft.pattern.trim()) return { problem: "say which parameters: a name or a glob" };
  const op: Record<string, unknown> = { pattern: draft.pattern.trim(), op: draft.op };
  for (const field of FIELDS[draft.op]) {
    const text = draft[field].trim();
    if (text === "" && draft.op === "clamp") continue;
    const value = Number(text);
    if (text === "" || !Number.isFinite(value)) return { problem: `${field}: expected a number` };
    op[field] = value;
  }
  if (draft.op === "clamp" && op["min"] === undefined && op["max"] === undefined) {
    return { problem: "min or max: expected a number for one of them" };
  }
  const body: EditBody = { id, ops: [op], wait_s: 30 };
  if (draft.ifStep.trim()) {
    const step = Number(draft.ifStep);
    if (!Number.isInteger(step) || step < 0) return { problem: "only at step: expected a whole number" };
    body.if_step = step;
  }
  if (draft.allowNonfinite) body.allow_nonfinite = true;
  if (draft.resetMoments) body.reset_moments = true;
  if (draft.note.trim()) body.note = draft.note.trim();
  if (dryRun) body.dry_run = true;
  return { body };
}

/** 32 hexadecimal digits, so that an edit that is sent twice is one. */
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

/** Seconds of a lease that are left now. */
export function leaseLeft(leaseLeftS: number | null | undefined, answeredAtMs: number, nowMs: number): number {
  return Math.max(0, (leaseLeftS ?? 0) - Math.max(0, nowMs - answeredAtMs) / 1000);
}
