/** Parses the part of Prometheus' text format that the page needs. Pure. */

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
