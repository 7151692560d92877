/** What updates do to each parameter: a table to sort, its cells shaded. Asked for, never polled. */

import { type ReactNode, useMemo, useState } from "react";

import { get } from "../api/client";
import type { UpdateDocument } from "../api/schema";
import { type Rgb, colorer } from "../lib/color";
import { count, number, percent } from "../lib/format";
import { Choice, Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";

const STEPS = [["1", "1 step"], ["10", "10 steps"], ["100", "100 steps"]] as const;
const MAX_ROWS = 500;

interface Measure {
  key: string;
  title: string;
  of: (row: UpdateDocument) => number | null;
  text?: (row: UpdateDocument) => string;
}

export const MEASURES: readonly Measure[] = [
  { key: "norm", title: "norm", of: (row) => row.norm },
  { key: "ratio", title: "ratio", of: (row) => row.ratio },
  { key: "max", title: "max", of: (row) => row.max_abs },
  { key: "changed", title: "changed", of: (row) => (row.numel ? row.changed / row.numel : null), text: (row) => percent(row.changed, row.numel) },
  { key: "moment", title: "v RMS", of: (row) => row.moment_rms },
  { key: "lr", title: "effective lr", of: (row) => row.effective_lr },
];

/** The rows in order; what has no number comes last. `sort`: a key, with "-" for falling. */
export function inOrder(rows: readonly UpdateDocument[], sort: string): UpdateDocument[] {
  const key = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const measure = MEASURES.find((one) => one.key === key);
  if (!measure) return [...rows].sort((a, b) => sign * (a.name < b.name ? -1 : 1));
  const value = (row: UpdateDocument): number => measure.of(row) ?? Number.NEGATIVE_INFINITY * sign * -1;
  return [...rows].sort((a, b) => sign * (value(a) - value(b)) || (a.name < b.name ? -1 : 1));
}

/** Shades the numbers of a column by their order of magnitude; null for none. */
export function shading(rows: readonly UpdateDocument[], measure: Measure, dark: boolean): (row: UpdateDocument) => Rgb | null {
  const logs = rows.flatMap((row) => {
    const value = measure.of(row);
    return value !== null && value > 0 ? [Math.log(value)] : [];
  });
  if (logs.length < 2) return () => null;
  const middle = [...logs].sort((a, b) => a - b)[Math.floor(logs.length / 2)]!;
  const most = Math.max(...logs.map((one) => Math.abs(one - middle)), Math.LN2);
  const color = colorer(-most, most, { signed: true, dark });
  return (row) => {
    const value = measure.of(row);
    return value !== null && value > 0 ? color(Math.log(value) - middle) : null;
  };
}

export function Changes(): ReactNode {
  const { job, dark } = useShared();
  const mayRead = useMay("read");
  const [steps, setSteps] = useQuery("steps", "1");
  const [sort, setSort] = useQuery("order", "-ratio");
  const [asked, setAsked] = useState(0);
  const updates = usePoll(
    asked > 0 ? `${job}/updates/${steps}/${asked}` : null,
    (signal) => get("/api/v1/jobs/{job}/updates", { path: { job }, query: { steps: Number(steps) }, signal }),
    0,
  );
  const found = updates.data;
  const all = useMemo(() => inOrder(found?.updates ?? [], sort), [found, sort]);
  const shades = useMemo(() => MEASURES.map((one) => shading(all, one, dark)), [all, dark]);
  const turn = (key: string): void => setSort(sort === `-${key}` ? key : `-${key}`);
  const rows = all.slice(0, MAX_ROWS);
  return (
    <Panel
      title="Changes"
      source={<Source what={`/jobs/${job}/updates`} at={updates.at} step={rows[0]?.step} incarnation={found?.incarnation} error={updates.error} busy={updates.busy} />}
      actions={
        <>
          <Choice label="Over" value={STEPS.find(([one]) => one === steps)?.[0] ?? "1"} options={STEPS} onChange={setSteps} />
          <button type="button" disabled={!mayRead || updates.busy} onClick={() => setAsked(asked + 1)}>
            Compare
          </button>
        </>
      }
    >
      {updates.error && <Trouble>{updates.error}</Trouble>}
      {!found && !updates.error && (
        <Empty>{mayRead ? "Compares the weights of two steps to come, in the sidecars." : "Needs a reader's token."}</Empty>
      )}
      {found?.moments_missing && <p className="faint">No second moments: {found.moments_missing}</p>}
      {rows.length > 0 && (
        <div className="scroll">
          <table className="plain" aria-label="Changes">
            <thead>
              <tr>
                <Head title="name" at="name" sort={sort} onSort={turn} />
                {MEASURES.map((one) => (
                  <Head key={one.key} title={one.title} at={one.key} sort={sort} onSort={turn} />
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={row.name}>
                  <td>
                    <button type="button" className="quiet" onClick={() => patchQuery({ as: "", name: row.name, part: "compare" })}>
                      <Name>{row.name}</Name>
                    </button>
                  </td>
                  {MEASURES.map((one, i) => (
                    <Cell key={one.key} text={one.text ? one.text(row) : number(one.of(row))} shade={shades[i]!(row)} />
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {all.length > rows.length && <p className="faint">The first {count(rows.length)} of {count(all.length)} in this order.</p>}
      {rows.length > 0 && <p className="faint">Shades tell how far a number is from its column's median; a name leads to the change of its cells.</p>}
    </Panel>
  );
}

function Head(props: { title: string; at: string; sort: string; onSort: (key: string) => void }): ReactNode {
  const { title, at, sort, onSort } = props;
  const here = sort.replace(/^-/, "") === at;
  const order = !here ? "none" : sort.startsWith("-") ? "descending" : "ascending";
  return (
    <th aria-sort={order} className={at === "name" ? "" : "num"}>
      <button type="button" className="quiet" onClick={() => onSort(at)}>
        {title}
        {here ? (sort.startsWith("-") ? " ↓" : " ↑") : ""}
      </button>
    </th>
  );
}

function Cell(props: { text: string; shade: Rgb | null }): ReactNode {
  const { text, shade } = props;
  return (
    <td className="num" style={shade ? { boxShadow: `inset 0.35rem 0 rgb(${shade.join(", ")})` } : undefined}>
      {text}
    </td>
  );
}
