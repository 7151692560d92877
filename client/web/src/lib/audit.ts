/** The audit as people read it: an action and its outcome on one line. Pure. */

import type { AuditRecord } from "../api/schema";

export interface Change {
  /** What was begun, or an event; the outcome itself where its beginning is on an older page. */
  record: AuditRecord;
  outcome: AuditRecord | null;
}

/** One line for each action, where it began; records are newest first. */
export function changesOf(records: readonly AuditRecord[]): Change[] {
  const begun = new Set(records.map((record) => record.seq));
  const outcomes = new Map(records.flatMap((record) => (record.of !== null && begun.has(record.of) ? [[record.of, record] as const] : [])));
  return records.filter((record) => record.of === null || !begun.has(record.of)).map((record) => ({ record, outcome: outcomes.get(record.seq) ?? null }));
}

/** How it ended, in a word or two. */
export function resultOf(change: Change): string {
  const { record, outcome } = change;
  if (outcome) return outcome.result ?? "";
  return record.kind === "intent" ? "no outcome yet" : (record.result ?? "");
}
