/** Parses the part of Prometheus' text format that the page needs, and says it in sentences. Pure. */

import { bytes, count, duration, plural } from "./format";

export interface Measure {
  name: string;
  labels: Readonly<Record<string, string>>;
  value: number;
}

export function parseMetrics(text: string): Measure[] {
  const found: Measure[] = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels: Record<string, string> = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key!] = value!.replace(/\\(.)/g, (_, c: string) => (c === "n" ? "\n" : c));
    }
    found.push({ name: match[1]!, labels, value: Number(match[3]) });
  }
  return found;
}

/** What the control plane has done and how it does, as a person would say it. */
export function sentencesOf(measures: readonly Measure[]): string[] {
  const sum = (name: string, of: (one: Measure) => boolean = () => true): number =>
    measures.filter((one) => one.name === name && of(one)).reduce((total, one) => total + one.value, 0);
  const is = (label: string, value: string) => (one: Measure): boolean => one.labels[label] === value;
  const rounds = sum("paramd_boundary_rounds_total");
  const captured = sum("paramd_boundary_rounds_total", is("captured", "true"));
  const looks = sum("paramd_watch_rounds_total");
  const failed = sum("paramd_watch_rounds_total", is("ok", "false"));
  const posts = sum("paramd_webhook_posts_total");
  const lost = sum("paramd_webhook_posts_total", is("ok", "false"));
  const dropped = sum("paramd_history_dropped_samples_total");
  const audit = measures.find((one) => one.name === "paramd_audit_ok");
  const lag = measures.find((one) => one.name === "paramd_loop_lag_max_seconds");
  return [
    `All ranks were asked for a common step ${plural(rounds, "time")}${rounds ? `, ${count(captured)} of them with a copy` : ""}.`,
    looks ? `Values were sampled ${plural(looks, "time")}; ${count(failed)} of the samples failed.` : "Values have not been sampled.",
    `${plural(sum("paramd_exports_total", (one) => one.labels["state"]?.toLowerCase() === "done"), "export")} done, ${count(sum("paramd_exports_running"))} running; ${bytes(sum("paramd_export_bytes_total"))} written.`,
    ...(posts ? [`${plural(posts, "notice")} sent to the webhook, ${count(lost)} failed.`] : []),
    audit?.value === 0 ? "The audit cannot be written: changes are refused." : "The audit is written.",
    dropped ? `${plural(dropped, "sample")} of the metric history ${dropped === 1 ? "is" : "are"} lost.` : "No sample of the metric history is lost.",
    ...(lag ? [`The longest that everything waited for the control plane itself: ${duration(lag.value)}.`] : []),
  ];
}
