/** Thousands of ranks as a map of cells on a canvas; the table has the same as text. */

import { type ReactNode, useEffect, useMemo, useState } from "react";

import { count, duration } from "../lib/format";
import { type Axis, coordinates } from "../lib/mesh";
import { inkOf } from "../ui/chart";
import { useShared } from "../ui/context";
import { useSize } from "../ui/hooks";
import { phaseText, type TileData, toneOfRank, wordOf } from "./mesh_tiles";

const GAP = 1;

interface Grid {
  columns: number;
  rows: number;
  cell: number;
  at: (index: number) => [number, number];
}

/** Position of each rank's cell; the last axis runs across and wraps. */
function gridOf(total: number, axes: readonly Axis[], width: number): Grid {
  const last = axes.at(-1)?.size ?? total;
  const wide = Math.max(1, Math.min(total, Math.ceil(Math.sqrt(total * 3))));
  // Whole lines of the last axis, placed side by side to keep the map about 3 to 1.
  const columns = axes.length > 1 && last <= wide ? Math.max(1, Math.floor(wide / last)) * last : wide;
  const rows = Math.ceil(total / columns);
  const cell = Math.max(4, Math.min(28, Math.floor(width / columns)));
  return { columns, rows, cell, at: (i) => [i % columns, Math.floor(i / columns)] };
}

export function FieldMap(props: {
  ranks: readonly TileData[];
  axes: readonly Axis[];
  picked: string;
  onPick: (rank: number) => void;
}): ReactNode {
  const { ranks, axes, picked, onPick } = props;
  const { dark } = useShared();
  const [box, width] = useSize<HTMLDivElement>();
  const [over, setOver] = useState<TileData | null>(null);
  const grid = useMemo(() => gridOf(ranks.length, axes, width || 600), [ranks.length, axes, width]);
  const [canvas, setCanvas] = useState<HTMLCanvasElement | null>(null);
  useEffect(() => {
    if (canvas) draw(canvas, ranks, grid, picked);
  }, [canvas, ranks, grid, picked, dark]);
  const find = (event: React.MouseEvent<HTMLCanvasElement>): TileData | null => {
    const rect = event.currentTarget.getBoundingClientRect();
    const x = Math.floor((event.clientX - rect.left) / grid.cell);
    const y = Math.floor((event.clientY - rect.top) / grid.cell);
    return x < grid.columns ? (ranks[y * grid.columns + x] ?? null) : null;
  };
  const place = over ? coordinates(over.rank, axes) : [];
  return (
    <div ref={box}>
      <canvas
        ref={setCanvas}
        className="field-map"
        role="img"
        aria-label={`${ranks.length} ranks; the table below lists them`}
        style={{ width: grid.columns * grid.cell, height: grid.rows * grid.cell }}
        onMouseMove={(event) => setOver(find(event))}
        onMouseLeave={() => setOver(null)}
        onClick={(event) => {
          const rank = find(event);
          if (rank) onPick(rank.rank);
        }}
      />
      <p className="readout">
        {over
          ? `rank ${over.rank} (${axes.map((axis, i) => `${axis.name} ${place[i]}`).join(", ")}) · ${wordOf(over)} ${phaseText(over.phase)} · step ${count(over.step)} · ${duration(over.step_time_ns / 1e9)}${over.late ? " · straggler" : ""}${over.reason ? ` · ${over.reason}` : ""}`
          : "point at a rank"}
      </p>
      <div className="legend">
        {(["ok", "warn", "bad", "info", "mute"] as const).map((tone) => (
          <span key={tone}>
            <i style={{ background: `var(--${tone === "mute" ? "faint" : tone})` }} />
            {{ ok: "ok", warn: "alert, degraded", bad: "down", info: "starting", mute: "ended, unknown" }[tone]}
          </span>
        ))}
      </div>
    </div>
  );
}

function draw(canvas: HTMLCanvasElement, ranks: readonly TileData[], grid: Grid, picked: string): void {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [grid.columns * grid.cell, grid.rows * grid.cell];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  if (!pen) return;
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colors = new Map(
    (["ok", "warn", "bad", "info", "mute"] as const).map((tone) => [
      tone,
      style.getPropertyValue(tone === "mute" ? "--faint" : `--${tone}`).trim(),
    ]),
  );
  ranks.forEach((rank, i) => {
    const [x, y] = grid.at(i);
    pen.fillStyle = colors.get(toneOfRank(rank)) ?? "gray";
    pen.fillRect(x * grid.cell, y * grid.cell, grid.cell - GAP, grid.cell - GAP);
    if (String(rank.rank) === picked) {
      pen.strokeStyle = inkOf().text;
      pen.lineWidth = 2;
      pen.strokeRect(x * grid.cell, y * grid.cell, grid.cell - GAP, grid.cell - GAP);
    }
  });
}
