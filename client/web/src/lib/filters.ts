/** Pieces of the API's filter language that the page writes itself. Pure. */

export const MAX_FILTER_BYTES = 1024;
const MAX_WORDS = 64;
const encoder = new TextEncoder();

/** A word that chooses exactly this name, or null when no filter can say it. */
export function exactly(name: string): string | null {
  return name === "" || name.includes('"') ? null : `"${literal(name)}"`;
}

/** The glob that matches this name alone: between brackets a character stands for itself. */
export function literal(name: string): string {
  return name.replace(/[*?[]/g, (mark) => `[${mark}]`);
}

/** Filters that together choose these names, each short enough for one request. */
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

export interface Range {
  begin: number;
  end: number;
}

/** "w[0:4, 8:16]" into the name and its ranges; the ranges are empty when there are none. */
export function parseSlice(text: string): { name: string; ranges: Range[] } {
  const found = /^(.*)\[(\s*\d+\s*:\s*\d+\s*(?:,\s*\d+\s*:\s*\d+\s*)*)\]$/.exec(text);
  if (!found) return { name: text, ranges: [] };
  const ranges = found[2]!.split(",").map((part) => {
    const [begin, end] = part.split(":").map((each) => Number(each.trim()));
    return { begin: begin!, end: end! };
  });
  return { name: found[1]!, ranges };
}

/** What the API takes for a part of a tensor. */
export function sliced(name: string, ranges: readonly Range[]): string {
  if (ranges.length === 0) return literal(name);
  return `${literal(name)}[${ranges.map(({ begin, end }) => `${begin}:${end}`).join(", ")}]`;
}
