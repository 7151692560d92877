/** Builds and parses parts of the API's filter language. Pure. */

export const MAX_FILTER_BYTES = 1024;
const MAX_WORDS = 64;
const encoder = new TextEncoder();

/** A word that selects exactly this name, or null when no filter can express it. */
export function exactly(name: string): string | null {
  return name === "" ? null : `"${literal(name).replace(/"/g, '""')}"`;
}

/** The glob that matches only this name: brackets quote special characters. */
export function literal(name: string): string {
  return name.replace(/[*?[]/g, (mark) => `[${mark}]`);
}

/** Filters that together select these names, each short enough for one request. */
export function filtersFor(names: readonly string[]): string[][] {
  const groups: string[][] = [];
  let group: string[] = [];
  let size = 0;
  for (const name of names) {
    const word = exactly(name);
    if (word === null) continue;
    const bytes = encoder.encode(word).length + 1;
    if (bytes > MAX_FILTER_BYTES) continue;
    if (size + bytes > MAX_FILTER_BYTES || group.length === MAX_WORDS) {
      groups.push(group);
      group = [];
      size = 0;
    }
    group.push(word);
    size += bytes;
  }
  if (group.length) groups.push(group);
  return groups;
}

const TERM = /^[a-z]+(?:!=|<=|>=|=|<|>|~)/;

/** The filter for what was typed: a plain word is a piece of a name, `*`, `?` and brackets make a glob, quotes a whole name. */
export function substrings(typed: string): string {
  if (typed.includes('"')) return typed.trim();
  const words = typed.trim().split(/\s+/).filter(Boolean);
  const one = (word: string): string => (/[*?[]/.test(word) || TERM.test(word) ? word : `name~${word}`);
  // A slice in brackets may hold spaces.
  return (typed.includes("[") ? typed.trim() : words.map(one).join(" ")) || "*";
}

export interface Range {
  begin: number;
  end: number;
}

/** Splits "w[0:4, 8:16]" into name and ranges; no ranges without a slice. */
export function parseSlice(text: string): { name: string; ranges: Range[] } {
  const found = /^(.*)\[(\s*\d+\s*:\s*\d+\s*(?:,\s*\d+\s*:\s*\d+\s*)*)\]$/.exec(text);
  if (!found) return { name: text, ranges: [] };
  const ranges = found[2]!.split(",").map((part) => {
    const [begin, end] = part.split(":").map((each) => Number(each.trim()));
    return { begin: begin!, end: end! };
  });
  return { name: found[1]!, ranges };
}

/** The API's name for a slice of a tensor. */
export function sliced(name: string, ranges: readonly Range[]): string {
  if (ranges.length === 0) return literal(name);
  return `${literal(name)}[${ranges.map(({ begin, end }) => `${begin}:${end}`).join(", ")}]`;
}
