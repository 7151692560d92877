/** A virtualized table: only visible rows are in the document. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { type ReactNode, memo, useEffect, useMemo, useRef, useSyncExternalStore } from "react";

export interface Column<T> {
  key: string;
  title: string;
  /** A CSS grid track such as "minmax(12rem, 2fr)". */
  width: string;
  numeric?: boolean;
  /** Hidden on narrow screens. */
  wide?: boolean;
  render: (item: T, index: number) => ReactNode;
}

interface Props<T> {
  label: string;
  columns: readonly Column<T>[];
  items: readonly T[];
  keyOf: (item: T) => string;
  selected?: string;
  onPick?: ((item: T) => void) | undefined;
  /** Called instead for a row that arrow keys pass: no step of Back for each. */
  onMove?: (item: T) => void;
  /** Called for Esc while a row is chosen. */
  onClose?: () => void;
  sort?: { key: string; down: boolean };
  onSort?: (key: string) => void;
  sortable?: ReadonlySet<string>;
  /** Why the other columns cannot be ordered by. */
  unsortable?: string;
  /** Called with the visible rows, [begin, end). */
  onSight?: (begin: number, end: number) => void;
  /** Maximum; few rows take less. */
  height?: string;
  toneOf?: (item: T) => string;
}

export const ROW_PX = 28;
const GAP_REM = 0.8;
const OVERSCAN = 6;
const LEAST_ROWS = 2;
const BORDERS_PX = 2;

const phone = window.matchMedia("(max-width: 720px)");

function useNarrow(): boolean {
  return useSyncExternalStore(
    (listener) => {
      phone.addEventListener("change", listener);
      return () => phone.removeEventListener("change", listener);
    },
    () => phone.matches,
  );
}

/** Minimum width of a grid track, so that a table that is too wide scrolls as a whole. */
function leastRem(track: string): number {
  return Number(/([\d.]+)rem/.exec(track)?.[1] ?? 6);
}

function RowsInner<T>(props: Props<T>): ReactNode {
  const { items, keyOf, selected, onPick, onSight } = props;
  const narrow = useNarrow();
  const columns = useMemo(() => props.columns.filter((column) => !(narrow && column.wide)), [props.columns, narrow]);
  const box = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({
    count: items.length,
    getScrollElement: () => box.current,
    estimateSize: () => ROW_PX,
    overscan: OVERSCAN,
    // Several scroll events arrive per frame; drawing one is enough.
    useFlushSync: false,
  });
  const shown = virtual.getVirtualItems();
  const begin = shown[0]?.index ?? 0;
  const end = (shown.at(-1)?.index ?? -1) + 1;
  useEffect(() => onSight?.(begin, end), [onSight, begin, end]);
  const tracks = columns.map((column) => column.width).join(" ");
  const least = columns.reduce((sum, column) => sum + leastRem(column.width), 0) + GAP_REM * columns.length;
  const at = selected ? items.findIndex((item) => keyOf(item) === selected) : -1;
  const there = at >= 0;
  // A link may choose a row that is far down.
  useEffect(() => {
    if (there) virtual.scrollToIndex(at);
  }, [selected, there]);
  const move = (by: number): void => {
    if (!onPick || items.length === 0) return;
    const next = Math.min(items.length - 1, Math.max(0, at + by));
    virtual.scrollToIndex(next);
    (props.onMove ?? onPick)(items[next]!);
  };
  return (
    <div
      className="rows"
      role="table"
      aria-label={props.label}
      aria-rowcount={items.length + 1}
      ref={box}
      tabIndex={0}
      style={{ height: `min(${props.height ?? "100%"}, ${ROW_PX * (Math.max(items.length, LEAST_ROWS) + 1) + BORDERS_PX}px)`, ["--tracks" as string]: tracks, ["--least" as string]: `${least}rem` }}
      onKeyDown={(event) => {
        const all = items.length;
        if (event.key === "Escape" && selected && props.onClose) {
          event.preventDefault();
          props.onClose();
          return;
        }
        const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -all, End: all }[event.key];
        if (by === undefined || !onPick) return;
        event.preventDefault();
        move(by);
      }}
    >
      <Heads {...props} columns={columns} />
      <div className="all" style={{ height: virtual.getTotalSize() }}>
        {shown.map((row) => {
          const item = items[row.index]!;
          const key = keyOf(item);
          return (
            <One
              key={key}
              item={item}
              index={row.index}
              top={row.start}
              columns={columns}
              selected={onPick ? key === selected : undefined}
              tone={props.toneOf?.(item) ?? ""}
              onPick={onPick}
            />
          );
        })}
      </div>
    </div>
  );
}

interface OneProps<T> {
  item: T;
  index: number;
  top: number;
  columns: readonly Column<T>[];
  selected: boolean | undefined;
  tone: string;
  onPick: ((item: T) => void) | undefined;
}

function OneInner<T>(props: OneProps<T>): ReactNode {
  const { item, index, top, columns, selected, tone, onPick } = props;
  return (
    <div
      role="row"
      aria-rowindex={index + 2}
      aria-selected={selected}
      className={`row ${tone} ${onPick ? "pick" : ""}`}
      style={{ transform: `translateY(${top}px)` }}
      onClick={onPick ? () => onPick(item) : undefined}
    >
      {columns.map((column) => (
        <div key={column.key} role="cell" className={cellClass(column)}>
          {column.render(item, index)}
        </div>
      ))}
    </div>
  );
}

/** Memoized: rows that stay visible while scrolling are not rendered again. */
const One = memo(OneInner) as typeof OneInner;

function Heads<T>(props: Props<T>): ReactNode {
  const { columns, sort, onSort, sortable } = props;
  return (
    <div role="row" className="row heads" aria-rowindex={1}>
      {columns.map((column) => {
        const active = sort?.key === column.key;
        const order = active ? (sort.down ? "descending" : "ascending") : undefined;
        return (
          <div key={column.key} role="columnheader" aria-sort={order} className={cellClass(column)}>
            {onSort && sortable?.has(column.key) ? (
              <button type="button" className="quiet" onClick={() => onSort(column.key)}>
                {column.title}
                {active ? (sort.down ? " ↓" : " ↑") : ""}
              </button>
            ) : (
              <span title={column.numeric ? props.unsortable : undefined}>{column.title}</span>
            )}
          </div>
        );
      })}
    </div>
  );
}

function cellClass<T>(column: Column<T>): string {
  return column.numeric ? "num" : "";
}

export const Rows = memo(RowsInner) as typeof RowsInner;
