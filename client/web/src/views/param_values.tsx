/** The exact values of a slice. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import { parseSlice, type Range, sliced } from "../lib/filters";
import { count, shortest } from "../lib/format";
import { Choice, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll, useQuery, useSettled } from "../ui/hooks";

const FIRST = [16, 8];
/** Limit of the page; the API returns more. */
const MAX_SHOWN = 4096;

export function Values(props: { name: string; shape: readonly number[] }): ReactNode {
  const { name, shape } = props;
  const { job } = useShared();
  const initial = useMemo(() => sliced("", shape.map((size, dim) => ({ begin: 0, end: Math.min(size, firstOf(dim, shape.length)) }))), [shape]);
  const [digits, setDigits] = useQuery("digits", "short");
  const [slice, setSlice] = useQuery("slice", initial);
  const settled = useSettled(slice, 300);
  const ranges = parseSlice(`x${settled}`).ranges;
  const problem = problemOf(ranges, settled, shape);
  const values = usePoll(
    problem ? null : `${job} ${name} ${settled}`,
    (signal) => get("/api/v1/jobs/{job}/params/values", { path: { job }, query: { name: sliced(name, ranges) }, signal }),
    0,
  );
  const found = values.data;
  const across = found?.shape.length ? found.shape.at(-1)! : 1;
  const rows = found ? Array.from({ length: Math.ceil(found.values.length / Math.max(1, across)) }, (_, i) => found.values.slice(i * across, (i + 1) * across)) : [];
  return (
    <Panel title="Values" actions={<Choice label="Digits" value={digits} options={[["short", "Short"], ["exact", "Exact"]] as const} onChange={setDigits} />} source={<Source what="/params/values" at={values.at} step={found?.step} incarnation={found?.incarnation} error={values.error} busy={values.busy} refresh={problem ? undefined : values.refresh} />}>
      <label className="field">
        Slice of {shape.join(" × ") || "a scalar"}, half-open
        <input type="text" className="mono" spellCheck={false} value={slice} onChange={(event) => setSlice(event.target.value)} />
      </label>
      {problem && <Trouble>{problem}</Trouble>}
      {values.error && <Trouble>{values.error}</Trouble>}
      {found && (
        <div className="values" tabIndex={0}>
          <table aria-label="Values">
            <tbody>
              {rows.map((row, i) => (
                <tr key={i}>
                  <th scope="row">{indexOf(found.begin, found.shape, i)}</th>
                  {row.map((value, j) => (
                    <td key={j} title={value}>{digits === "exact" ? value : shortest(value, found.dtype)}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function firstOf(dim: number, dims: number): number {
  if (dims === 1) return 64;
  return dim >= dims - 2 ? FIRST[dim - (dims - 2)]! : 1;
}

function problemOf(ranges: readonly Range[], text: string, shape: readonly number[]): string {
  if (shape.length === 0) return "";
  if (ranges.length === 0) return `${text}: expected a range for each of the first dims, such as [0:4, 0:8]`;
  const sizes = shape.map((size, dim) => {
    const range = ranges[dim];
    return range ? Math.max(0, Math.min(range.end, size) - range.begin) : size;
  });
  const total = sizes.reduce((product, size) => product * size, 1);
  return total > MAX_SHOWN ? `${count(total)} values; at most ${count(MAX_SHOWN)} are shown here` : "";
}

/** Index of the first element of a row of the table, without the last dim. */
function indexOf(begin: readonly number[], shape: readonly number[], row: number): string {
  const outer = shape.slice(0, -1);
  const found: number[] = [];
  let left = row;
  for (let dim = outer.length - 1; dim >= 0; dim -= 1) {
    found.unshift((begin[dim] ?? 0) + (left % outer[dim]!));
    left = Math.floor(left / outer[dim]!);
  }
  return found.length ? `[${found.join(", ")}]` : `[${begin[0] ?? 0}]`;
}
