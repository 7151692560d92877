/** Parameters: a filtered list with statistics, and one parameter in detail. */

import { type ReactNode, useCallback, useEffect, useMemo, useState } from "react";

import type { ParamDocument, StatsDocument } from "../api/schema";
import { count, shape, short } from "../lib/format";
import { substrings } from "../lib/filters";
import { nextSort, sortedBy } from "../lib/sort";
import { badCount, COLUMNS, text, valueOf } from "../lib/stats";
import { type Row, rowsOf, treeOf } from "../lib/tree";
import { Choice, Empty, Name, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { patchQuery, useQuery, useSettled } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";
import { Changes } from "./param_changes";
import { ParamDetail } from "./param_detail";
import { States } from "./param_states";
import { MAX_WHOLE, useNumbers, useParams } from "./params_load";
import { Over } from "./remains";

const TYPING_MS = 180;
const SHOWN = [["list", "List"], ["tree", "Tree"], ["changes", "Changes"], ["states", "Two states"]] as const;
type Item = Row<ParamDocument>;

export default function Params(): ReactNode {
  if (useShared().summary?.state !== "ended") return <Live />;
  return (
    <>
      <div className="head">
        <h1>Parameters</h1>
      </div>
      <Over what="the parameters in memory" />
    </>
  );
}

function Live(): ReactNode {
  const { job } = useShared();
  const [filter, setFilter] = useQuery("filter");
  const [as, setAs] = useQuery("as", "list");
  const [sort, setSort] = useQuery("sort");
  const [name] = useQuery("name");
  const asked = substrings(useSettled(filter, TYPING_MS));
  const [round, setRound] = useState(0);
  // The control plane orders and filters what is too much to be loaded.
  const [large, setLarge] = useState({ of: "", many: false });
  const many = large.of === `${job} ${asked}` && large.many;
  const listed = useParams(job, asked, many ? orderOf(sort) : "", round);
  useEffect(() => {
    if (listed.order === "" && listed.total > 0) setLarge({ of: `${job} ${listed.filter}`, many: listed.total > MAX_WHOLE });
  }, [job, listed]);
  const numbers = useNumbers(job, asked, listed);
  const [closed, setClosed] = useState<ReadonlySet<string>>(new Set());
  // All that can be had is there: what is missing now is not known, or not for this role.
  const whole = numbers.at > 0 && !numbers.busy && listed.done && listed.total <= MAX_WHOLE;
  const tree = useMemo(() => (as === "tree" ? treeOf(listed.items) : null), [as, listed.items]);
  const rows = useMemo<Item[]>(() => {
    if (tree) return rowsOf(tree, closed);
    const leaves = listed.items.map((item): Item => ({ kind: "leaf", item, label: item.name, depth: 0 }));
    return SORTABLE.has(sort.replace(/^-/, "")) && !many ? [...sortedBy(leaves, sort, (row, key) => sortValue(row, key, numbers.of))] : leaves;
  }, [tree, closed, listed.items, sort, many, numbers.of]);
  const toggle = useCallback((path: string) => {
    setClosed((old) => {
      const next = new Set(old);
      if (!next.delete(path)) next.add(path);
      return next;
    });
  }, []);
  const columns = useMemo(() => columnsOf(numbers.of, name !== "", whole), [numbers.of, name, whole]);
  const { sight } = numbers;
  const onSight = useCallback(
    (begin: number, end: number) => {
      sight(rows.slice(begin, end).flatMap((row) => (row.kind === "leaf" ? [row.item.name] : [])));
    },
    [rows, sight],
  );
  const toneOf = useCallback(
    (row: Item) => (row.kind === "leaf" && bad(numbers.of.get(row.item.name)) ? "bad" : ""),
    [numbers.of],
  );
  const onPick = useCallback(
    (row: Item) => (row.kind === "branch" ? toggle(row.path) : patchQuery({ name: row.item.name, part: "" })),
    [toggle],
  );
  const order = useMemo(() => ({ key: sort.replace(/^-/, ""), down: sort.startsWith("-") }), [sort]);
  const onSort = useCallback((each: string) => setSort(nextSort(sort, each)), [sort, setSort]);
  const steps = numbers.steps[0] === numbers.steps[1] ? numbers.steps[0] : undefined;
  return (
    <>
      <div className="head">
        <h1>Parameters</h1>
        <span className="faint" role="status" data-testid="total">
          {listed.error ? "" : listed.done ? count(listed.total) : `${count(listed.items.length)} of ${count(listed.total)} …`}
        </span>
        <span className="sources">
          <Source what="layout" at={listed.at} error={listed.error} refresh={() => setRound((n) => n + 1)} />
          <Source
          what="/params/stats"
          at={numbers.at}
          step={steps}
          incarnation={numbers.incarnation}
          error={numbers.error}
          busy={numbers.busy}
          refresh={numbers.refresh}
          />
        </span>
      </div>
      <div className={`params ${name ? "open" : ""} ${name && listed.done && rows.length <= 1 && as === "list" ? "alone" : ""}`}>
        <div className="list">
          <div className="stack">
            <div className="bar-row">
              <div className="grow">
                <input
                  type="search"
                  data-filter
                  spellCheck={false}
                  aria-label="Filter"
                  aria-invalid={listed.error !== null}
                  placeholder="part of a name, layers.*.weight numel>1M norm>10   ( / , ? for help)"
                  value={filter}
                  onChange={(event) => setFilter(event.target.value)}
                />
              </div>
              <Choice label="Show as" value={SHOWN.find(([one]) => one === as)?.[0] ?? "list"} options={SHOWN} onChange={setAs} />
            </div>
            {listed.error && <Trouble>{listed.error}</Trouble>}
            {listed.error && listed.order && <button type="button" className="small" onClick={() => setSort("")}>The model's order</button>}
            {numbers.error && !listed.error && <Trouble>{numbers.error}</Trouble>}
            {listed.missing.length > 0 && (
              <Trouble>
                {listed.missing.length} not available now, first {listed.missing[0]!.name}: {listed.missing[0]!.reason}
              </Trouble>
            )}
            {many && listed.step >= 0 && (
              <p className="faint">
                In the order of {sort.replace(/^-/, "")} at step {count(listed.step)}, without buffers. <button type="button" className="small" onClick={() => setRound((n) => n + 1)}>Order again</button>
              </p>
            )}
            {many && listed.busy && <p className="faint">The ranks order {count(listed.total || undefined)} tensors …</p>}
            {steps === undefined && numbers.steps[0] >= 0 && (
              <p className="faint">
                Statistics of the rows in view, loaded while scrolling: steps {count(numbers.steps[0])} to{" "}
                {count(numbers.steps[1])}. Narrow the filter to {count(MAX_WHOLE)} tensors to get all at one step.
              </p>
            )}
          </div>
          {listed.done && listed.items.length === 0 && (
            <Empty>
              {asked !== "*" ? `No parameter matches ${filter.trim()}.` : "This job has no parameters."}
              {asked !== "*" && <button type="button" className="small" onClick={() => setFilter("")}>Clear the filter</button>}
            </Empty>
          )}
          {as === "changes" && <Changes />}
          {as === "states" && <States />}
          {as !== "changes" && as !== "states" && (rows.length > 0 || !(listed.done || listed.error)) && <Rows
            label="Parameters"
            columns={columns}
            items={rows}
            keyOf={keyOf}
            selected={name}
            onPick={onPick}
            onMove={onMove}
            onClose={close}
            sort={order}
            onSort={as === "tree" ? noSort : onSort}
            sortable={as === "tree" ? NONE : SORTABLE}
            onSight={onSight}
            toneOf={toneOf}
          />}
        </div>
        {name && <ParamDetail key={`${job} ${name}`} name={name} />}
      </div>
    </>
  );
}

const NONE: ReadonlySet<string> = new Set();
const noSort = (): void => undefined;
const SORTABLE = new Set(["name", "dtype", "numel", "nan", ...COLUMNS.map((one) => one.title)]);

/** The order as the API names it. */
const orderOf = (sort: string): string => (SORTABLE.has(sort.replace(/^-/, "")) ? sort.replace(/nan$/, "bad") : "");
const close = (): void => patchQuery({ name: "", part: "" });
const onMove = (row: Item): void => {
  if (row.kind === "leaf") patchQuery({ name: row.item.name, part: "" }, { replace: true });
};
const keyOf = (row: Item): string => (row.kind === "branch" ? `${row.path}/` : row.item.name);

function bad(stats: StatsDocument | undefined): boolean {
  return stats !== undefined && badCount(stats) > 0;
}

function columnsOf(stats: ReadonlyMap<string, StatsDocument>, narrow: boolean, whole: boolean): Column<Item>[] {
  const of = (row: Item): StatsDocument | undefined => (row.kind === "leaf" ? stats.get(row.item.name) : undefined);
  const cell = (row: Item, read: (found: StatsDocument) => ReactNode): ReactNode => {
    const found = of(row);
    return found ? read(found) : row.kind === "leaf" ? <span className="faint" title={whole ? "not available now, or too small for this role" : "loading"}>{whole ? "–" : "…"}</span> : "";
  };
  const facts: Column<Item>[] = [
    { key: "dtype", title: "dtype", width: "5.2rem", wide: true, render: (row) => (row.kind === "leaf" ? row.item.dtype : "") },
    { key: "placement", title: "placement", width: "minmax(7rem, 1fr)", wide: true, render: (row) => (row.kind === "leaf" ? row.item.placement : "") },
  ];
  const name: Column<Item> = {
    key: "name",
    title: "name",
    width: "minmax(11rem, 2.2fr)",
    render: (row) =>
      row.kind === "branch" ? (
        <span style={{ paddingLeft: `${row.depth}rem` }}>
          <span className="twist">{row.open ? "▾" : "▸"}</span>
          <Name>{row.label}</Name> <span className="faint">{count(row.leaves)}</span>
        </span>
      ) : (
        <span style={{ paddingLeft: `${row.depth}rem` }}>
          {row.depth > 0 && <span className="twist" />}
          <Name>{row.label}</Name>
        </span>
      ),
  };
  const rest: Column<Item>[] = [
    { key: "numel", title: "elements", width: "5.2rem", numeric: true, wide: true, render: (row) => short(row.kind === "leaf" ? row.item.numel : row.numel) },
    ...COLUMNS.map((one): Column<Item> => ({
      key: one.title,
      title: one.title,
      width: one.width!,
      numeric: true,
      wide: one.wide ?? false,
      render: (row) => cell(row, (found) => (badCount(found) > 0 && one.key !== "zero_count" ? <span title={`without ${count(badCount(found))} NaN or Inf`}>{text(one, found)} *</span> : text(one, found))),
    })),
    { key: "nan", title: "NaN/Inf", width: "4.4rem", numeric: true, render: (row) => cell(row, (found) => count(badCount(found))) },
  ];
  const shapes: Column<Item> = { key: "shape", title: "shape", width: "7.5rem", wide: true, render: (row) => (row.kind === "leaf" ? shape(row.item.shape) : "") };
  return narrow ? [name, shapes, ...rest.filter((c) => c.key === "norm" || c.key === "nan")] : [name, shapes, ...facts, ...rest];
}

/** What a row is sorted by; null where it is not known. */
function sortValue(row: Item, key: string, stats: ReadonlyMap<string, StatsDocument>): string | number | null {
  if (row.kind !== "leaf") return null;
  if (key === "name") return row.item.name;
  if (key === "dtype") return row.item.dtype;
  if (key === "numel") return row.item.numel;
  const found = stats.get(row.item.name);
  if (!found) return null;
  const one = COLUMNS.find((each) => each.title === key);
  return one ? (valueOf(one, found) ?? null) : badCount(found);
}
