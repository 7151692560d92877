/** Heat map of a tensor; dragging over a part zooms in by requesting that slice. */

import { type ReactNode, useEffect, useMemo, useState } from "react";

import { get } from "../api/client";
import type { HeatmapDocument } from "../api/schema";
import { colorer } from "../lib/color";
import { parseSlice, type Range, sliced } from "../lib/filters";
import { count, number } from "../lib/format";
import { indexTicks, type Tick, valueTicks } from "../lib/ticks";
import { Choice, Empty, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";

const MODES = [["mean", "Mean"], ["absmax", "|x| max"], ["min", "Min"], ["max", "Max"]] as const;
type Mode = (typeof MODES)[number][0];
const CELLS = 160;
const EVERY_MS = 15_000;

interface Cell {
  row: number;
  col: number;
}

export function HeatPanel(props: { name: string; shape: readonly number[] }): ReactNode {
  const { name, shape } = props;
  const { job } = useShared();
  const [mode, setMode] = useQuery("mode", "mean");
  const [at] = useQuery("zoom");
  const ranges = useMemo(() => parseSlice(`x${at}`).ranges, [at]);
  const asked = sliced(name, ranges);
  const heat = usePoll(
    `${job} ${asked} ${mode}`,
    (signal) =>
      get("/api/v1/jobs/{job}/params/heatmap", {
        path: { job },
        query: { name: asked, mode: mode as Mode, rows: CELLS, columns: CELLS },
        signal,
      }),
    EVERY_MS,
  );
  const found = heat.data;
  const zoom = (next: readonly Range[]): void => patchQuery({ zoom: next.length ? sliced("", next) : "" });
  return (
    <Panel
      title="Heat map"
      actions={
        <>
          <Choice label="Cell value" value={mode as Mode} options={MODES} onChange={setMode} />
          <button type="button" disabled={ranges.length === 0} onClick={() => zoom([])}>
            Whole
          </button>
        </>
      }
      source={<Source what="/params/heatmap" at={heat.at} step={found?.step} incarnation={found?.incarnation} error={heat.error} busy={heat.busy} refresh={heat.refresh} />}
    >
      {heat.error && <Trouble>{heat.error}</Trouble>}
      {found && found.values.every((value) => value === null) && <Empty>No element of this part is finite: every cell is drawn as such.</Empty>}
      {found && <Picture key={asked} heat={found} shape={shape} ranges={ranges} signed={mode !== "absmax"} onZoom={zoom} />}
    </Panel>
  );
}

function Picture(props: {
  heat: HeatmapDocument;
  shape: readonly number[];
  ranges: readonly Range[];
  signed: boolean;
  onZoom: (ranges: Range[]) => void;
}): ReactNode {
  const { heat, shape, ranges, signed, onZoom } = props;
  const { dark } = useShared();
  const [canvas, setCanvas] = useState<HTMLCanvasElement | null>(null);
  const [over, setOver] = useState<Cell | null>(null);
  const [from, setFrom] = useState<Cell | null>(null);
  const bounds = useMemo(() => extent(heat.values), [heat]);
  const color = useMemo(() => colorer(bounds[0], bounds[1], { signed, dark }), [bounds, signed, dark]);
  // Of signed values 0 is in the middle of the scale, whatever the extent.
  const most = Math.max(Math.abs(bounds[0]), Math.abs(bounds[1]));
  const scale: [number, number] = signed ? [-most, most] : bounds;
  useEffect(() => {
    if (canvas) paint(canvas, heat, color);
  }, [canvas, heat, color]);
  const [rows, cols] = [heat.cell_row_count, heat.cell_col_count];
  const cellAt = (event: React.PointerEvent<HTMLCanvasElement>): Cell => {
    const rect = event.currentTarget.getBoundingClientRect();
    const clamp = (part: number, n: number): number => Math.min(n - 1, Math.max(0, Math.floor(part * n)));
    return {
      row: clamp((event.clientY - rect.top) / rect.height, rows),
      col: clamp((event.clientX - rect.left) / rect.width, cols),
    };
  };
  const value = over ? heat.values[over.row * cols + over.col] : null;
  const where = over && partOf(heat, over, over);
  // Vectors and narrow matrices still need some height to point at.
  const height = { aspectRatio: `${Math.max(1, cols)} / ${Math.max(1, rows)}`, minHeight: 48, maxHeight: 480 };
  const bad = heat.nonfinite.reduce((sum, one) => sum + (one[2] ?? 0), 0);
  return (
    <>
      <div className="heat-frame">
      <Ticks className="down" ticks={indexTicks(heat.row_count, beginOf(shape, ranges, "rows"))} side="top" />
      <div className="heat">
        <canvas
          ref={setCanvas}
          role="img"
          aria-label={`${heat.name}, ${count(heat.row_count)} by ${count(heat.col_count)}, from ${number(bounds[0])} to ${number(bounds[1])}`}
          style={height}
          onPointerDown={(event) => {
            event.currentTarget.setPointerCapture(event.pointerId);
            setFrom(cellAt(event));
          }}
          onPointerMove={(event) => setOver(cellAt(event))}
          onPointerLeave={() => setOver(null)}
          onPointerUp={(event) => {
            const to = cellAt(event);
            if (from && (from.row !== to.row || from.col !== to.col)) onZoom(zoomed(heat, shape, ranges, from, to));
            setFrom(null);
          }}
        />
        {from && over && (
          <div
            className="drag"
            style={{
              left: `${(100 * Math.min(from.col, over.col)) / cols}%`,
              top: `${(100 * Math.min(from.row, over.row)) / rows}%`,
              width: `${(100 * (Math.abs(from.col - over.col) + 1)) / cols}%`,
              height: `${(100 * (Math.abs(from.row - over.row) + 1)) / rows}%`,
            }}
          />
        )}
      </div>
      <Scale bounds={scale} color={color} />
      <Ticks className="across" ticks={indexTicks(heat.col_count, beginOf(shape, ranges, "cols"))} side="left" />
      </div>
      <p className="readout" data-testid="readout">
        {over && where
          ? `${placed("row", where.rows, beginOf(shape, ranges, "rows"))}, ${placed("column", where.cols, beginOf(shape, ranges, "cols"))}: ${value === null || value === undefined ? "no finite element" : number(value, 5)}`
          : "drag over a part to look closer"}
      </p>
      <div className="legend">
        <span>
          shown {heat.shape.join(" × ")}
          {ranges.length > 0 && `, ${sliced("", ranges)}`}
        </span>
        <span>
          {count(heat.row_count)} × {count(heat.col_count)} in {rows} × {cols} cells
        </span>
        <span>
          from {number(bounds[0])} to {number(bounds[1])}
        </span>
        {bad > 0 && <span className="source bad">{count(bad)} not finite (drawn magenta)</span>}
      </div>
    </>
  );
}

function Ticks(props: { className: string; ticks: readonly Tick[]; side: "top" | "left" }): ReactNode {
  return (
    <div className={`ticks ${props.className}`} aria-hidden>
      {props.ticks.map((tick) => (
        <span key={tick.label} style={{ [props.side]: `${100 * tick.at}%` }}>
          {tick.label}
        </span>
      ))}
    </div>
  );
}

const STOPS = 9;

/** The colours of the values, the largest at the top. */
function Scale(props: { bounds: [number, number]; color: (value: number) => readonly number[] }): ReactNode {
  const [low, high] = props.bounds;
  const stops = Array.from({ length: STOPS }, (_, i) => `rgb(${props.color(high - ((high - low) * i) / (STOPS - 1)).join(" ")})`);
  const ticks = valueTicks(low, high, 5, (value) => number(value, 3));
  return (
    <div className="scale" role="img" aria-label={`Colours from ${number(low)} to ${number(high)}`}>
      <div className="ramp" style={{ background: `linear-gradient(${stops.join(", ")})` }} />
      <Ticks className="" side="top" ticks={[...ticks].reverse().map((tick) => ({ ...tick, at: 1 - tick.at }))} />
    </div>
  );
}

/** Rows or columns of the tensor; one alone without a range. */
function placed(what: string, range: Range, from: number): string {
  const [first, last] = [from + range.begin, from + range.end - 1];
  return first === last ? `${what} ${first}` : `${what}s ${first}–${last}`;
}

/** The first index of the tensor that is shown, down or across; 0 when dims are flattened. */
function beginOf(shape: readonly number[], ranges: readonly Range[], way: "rows" | "cols"): number {
  if (shape.length === 1) return way === "cols" ? (ranges[0]?.begin ?? 0) : 0;
  if (way === "rows") return ranges[0]?.begin ?? 0;
  return shape.length === 2 ? (ranges[1]?.begin ?? 0) : 0;
}

function extent(values: readonly (number | null)[]): [number, number] {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

function paint(
  canvas: HTMLCanvasElement,
  heat: HeatmapDocument,
  color: (value: number) => readonly [number, number, number],
): void {
  const [rows, cols] = [heat.cell_row_count, heat.cell_col_count];
  canvas.width = cols;
  canvas.height = rows;
  const pen = canvas.getContext("2d");
  if (!pen || rows * cols === 0) return;
  const image = pen.createImageData(cols, rows);
  heat.values.forEach((value, i) => {
    const [r, g, b] = value === null ? [128, 128, 128] : color(value);
    image.data.set([r, g, b, 255], i * 4);
  });
  for (const [row, col] of heat.nonfinite) image.data.set([255, 0, 200, 255], (row! * cols + col!) * 4);
  pen.putImageData(image, 0, 0);
}

/** Rows and columns of the shown matrix covered by cells `from` to `to`. */
function partOf(heat: HeatmapDocument, from: Cell, to: Cell): { rows: Range; cols: Range } {
  const range = (a: number, b: number, cells: number, n: number): Range => ({
    // Row r is in cell floor(r * cells / n).
    begin: Math.ceil((Math.min(a, b) * n) / cells),
    end: Math.ceil(((Math.max(a, b) + 1) * n) / cells),
  });
  return {
    rows: range(from.row, to.row, heat.cell_row_count, heat.row_count),
    cols: range(from.col, to.col, heat.cell_col_count, heat.col_count),
  };
}

/** The selected slice of the whole tensor: both dims of a matrix, otherwise the first dim. */
function zoomed(heat: HeatmapDocument, shape: readonly number[], ranges: readonly Range[], from: Cell, to: Cell): Range[] {
  const part = partOf(heat, from, to);
  const moved = (dim: number, range: Range): Range => {
    const begin = ranges[dim]?.begin ?? 0;
    return { begin: begin + range.begin, end: begin + range.end };
  };
  if (shape.length === 1) return [moved(0, part.cols)];
  if (shape.length === 2) return [moved(0, part.rows), moved(1, part.cols)];
  return [moved(0, part.rows)];
}
