/** Groups alerts that have one cause, the first one first. Pure. */

import type { Alert } from "../api/schema";

export interface Cause {
  /** Of the first alert: stable while the group lasts. */
  id: string;
  /** The first alert: the likely cause of the others. */
  first: Alert;
  /** All of them, oldest first. */
  alerts: readonly Alert[];
  firing: number;
  critical: boolean;
  /** By rule, the most frequent first. */
  rules: readonly [string, number][];
}

/** Alerts of one family that begin within this time of each other have one cause. */
export const WINDOW_S = 120;

const FAMILIES: Record<string, string> = {
  "non-finite": "values",
  "norm-jump": "values",
  "gradient-jump": "values",
  "stale-rank": "ranks",
  "stalled-rank": "ranks",
  stuck: "ranks",
  "slow-rank": "ranks",
  straggler: "ranks",
  "layout-mismatch": "ranks",
};

const RULES: Record<string, string> = {
  "non-finite": "NaN or Inf", "norm-jump": "Norm jumped", "gradient-jump": "Gradient jumped", "replica-drift": "Replicas differ",
  "stale-rank": "Rank lost", "stalled-rank": "Rank stalled", straggler: "Rank slower", "slow-rank": "Slow rank", stuck: "Stuck",
  "layout-mismatch": "Layouts differ", "clock-jump": "Clock jumped", "failed-export": "Export failed", certificate: "Certificate expires", store: "Nothing is recorded", "lost-mark": "Restore point lost", "logged-number": "Logged metric",
};

/** A rule in words for people; the settings call it by its own name. */
export function ruleText(rule: string): string {
  return RULES[rule] ?? rule;
}

/** What alerts of these rules have in common. */
export function familyOf(rule: string): string {
  return FAMILIES[rule] ?? rule;
}

/**
 * Groups: those that fire first, critical ones before others, then the one that began first;
 * then resolved ones, the newest first. The alert that the control plane takes for the cause comes before all.
 */
export function causesOf(alerts: readonly Alert[], likely = ""): Cause[] {
  const open = new Map<string, Alert[]>();
  const groups: Alert[][] = [];
  for (const alert of [...alerts].sort(before)) {
    const key = `${alert.incarnation} ${familyOf(alert.rule)}`;
    const group = open.get(key);
    if (group && alert.first_seen_s - group.at(-1)!.first_seen_s <= WINDOW_S) {
      group.push(alert);
    } else {
      const fresh = [alert];
      open.set(key, fresh);
      groups.push(fresh);
    }
  }
  const told = (cause: Cause): boolean => cause.alerts.some((alert) => alert.id === likely);
  return groups.map((group) => causeOf(group, likely)).sort((a, b) => Number(told(b)) - Number(told(a)) || rank(a, b));
}

function before(a: Alert, b: Alert): number {
  return a.first_seen_s - b.first_seen_s || order(a) - order(b) || number(a) - number(b);
}

/** Of alerts that were found in the same round, a value that is not finite explains a jump. */
function order(alert: Alert): number {
  return alert.severity === "critical" ? 0 : 1;
}

/** Alerts are numbered as they fire: `job-incarnation-number-time`. */
function number(alert: Alert): number {
  return Number(alert.id.split("-").at(-2)) || 0;
}

function causeOf(alerts: Alert[], likely: string): Cause {
  const firing = alerts.filter((alert) => alert.state === "firing");
  const rules = new Map<string, number>();
  for (const alert of alerts) rules.set(alert.rule, (rules.get(alert.rule) ?? 0) + 1);
  return {
    id: alerts[0]!.id,
    first: alerts.find((alert) => alert.id === likely) ?? alerts[0]!,
    alerts,
    firing: firing.length,
    critical: firing.some((alert) => alert.severity === "critical"),
    rules: [...rules].sort((a, b) => b[1] - a[1]),
  };
}

function rank(a: Cause, b: Cause): number {
  if ((a.firing > 0) !== (b.firing > 0)) return a.firing > 0 ? -1 : 1;
  if (a.firing === 0) return b.first.first_seen_s - a.first.first_seen_s;
  if (a.critical !== b.critical) return a.critical ? -1 : 1;
  return a.first.first_seen_s - b.first.first_seen_s;
}
