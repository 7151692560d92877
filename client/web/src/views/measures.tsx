/** A table of numbers by parameter, sorted by any column and shaded like a heat map. */

import { type ReactNode, useMemo } from "react";

import { colorer, type Rgb } from "../lib/color";
import { count, number } from "../lib/format";
import { Name } from "../ui/bits";
import { useShared } from "../ui/context";

const MAX_ROWS = 500;

export interface Measure<Row> {
  key: string;
  title: string;
  of: (row: Row) => number | null;
  text?: (row: Row) => string;
}

interface Named {
  name: string;
}

/** The rows in order; what has no number comes last. `sort`: a key, with "-" for falling. */
export function inOrder<Row extends Named>(rows: readonly Row[], sort: string, measures: readonly Measure<Row>[]): Row[] {
  const key = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const measure = measures.find((one) => one.key === key);
  if (!measure) return [...rows].sort((a, b) => sign * (a.name < b.name ? -1 : 1));
  const value = (row: Row): number => measure.of(row) ?? Number.NEGATIVE_INFINITY * sign * -1;
  return [...rows].sort((a, b) => sign * (value(a) - value(b)) || (a.name < b.name ? -1 : 1));
}

/** Shades the numbers of a column by their order of magnitude; null for none. */
export function shading<Row>(rows: readonly Row[], measure: Measure<Row>, dark: boolean): (row: Row) => Rgb | null {
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

export function MeasureTable<Row extends Named>(props: {
  label: string;
  rows: readonly Row[];
  measures: readonly Measure<Row>[];
  sort: string;
  onSort: (sort: string) => void;
  onPick: (name: string) => void;
  /** Where a name leads. */
  leads: string;
}): ReactNode {
  const { label, measures, sort, onSort, onPick, leads } = props;
  const { dark } = useShared();
  const all = useMemo(() => inOrder(props.rows, sort, measures), [props.rows, sort, measures]);
  const shades = useMemo(() => measures.map((one) => shading(all, one, dark)), [all, measures, dark]);
  const turn = (key: string): void => onSort(sort === `-${key}` ? key : `-${key}`);
  const rows = all.slice(0, MAX_ROWS);
  return (
    <>
      <div className="scroll">
        <table className="plain shaded" aria-label={label}>
          <thead>
            <tr>
              <Head title="name" at="name" sort={sort} onSort={turn} />
              {measures.map((one) => (
                <Head key={one.key} title={one.title} at={one.key} sort={sort} onSort={turn} />
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.name}>
                <td>
                  <button type="button" className="quiet" onClick={() => onPick(row.name)}>
                    <Name>{row.name}</Name>
                  </button>
                </td>
                {measures.map((one, i) => (
                  <Cell key={one.key} text={one.text ? one.text(row) : number(one.of(row))} shade={shades[i]!(row)} />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {all.length > rows.length && <p className="faint">The first {count(rows.length)} of {count(all.length)} in this order.</p>}
      <p className="faint">Shades show how far a number is from its column's median; a name leads to {leads}.</p>
    </>
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
