/** How a tensor is sharded, and which rank holds which part. */

import type { ReactNode } from "react";

import type { ParamDetail, PieceDocument } from "../api/schema";
import { bytes, count } from "../lib/format";
import { Panel, Source } from "../ui/bits";
import { type Column, Rows } from "../ui/rows";

const MAX_DRAWN = 1024;
const WIDTH = 400;

interface Region {
  key: string;
  begin: number[];
  end: number[];
  ranks: number[];
}

export function Pieces(props: { detail: ParamDetail; at: number }): ReactNode {
  const { detail, at } = props;
  const regions = regionsOf(detail.pieces);
  return (
    <Panel title="Placement" source={<Source what="layout" at={at} />}>
      <p className="faint">
        {detail.placement}: {count(detail.piece_count)} pieces, {count(regions.length)} distinct regions
        {regions.some((region) => region.ranks.length > 1) ? "; a region with several ranks is replicated" : ""}
      </p>
      <Drawing detail={detail} regions={regions.slice(0, MAX_DRAWN)} />
      <Rows label="Pieces" columns={COLUMNS} items={detail.pieces} keyOf={(p) => `${p.rank} ${p.begin} ${p.end}`} height="18rem" />
    </Panel>
  );
}

const COLUMNS: readonly Column<PieceDocument>[] = [
  { key: "rank", title: "rank", width: "3rem", numeric: true, render: (p) => p.rank },
  { key: "region", title: "part [begin, end)", width: "minmax(8.5rem, 1fr)", render: (p) => (p.numel ? p.begin.map((b, i) => `${b}:${p.end[i]}`).join(", ") + (p.region === "interval" ? " of the flattened tensor" : "") : "nothing") },
  { key: "numel", title: "elements", width: "6rem", numeric: true, render: (p) => count(p.numel) },
  { key: "bytes", title: "size", width: "6rem", numeric: true, wide: true, render: (p) => bytes(p.size_bytes) },
];

function regionsOf(pieces: readonly PieceDocument[]): Region[] {
  const found = new Map<string, Region>();
  for (const piece of pieces) {
    if (piece.numel === 0) continue;
    const key = `${piece.begin.join()}:${piece.end.join()}`;
    const region = found.get(key) ?? { key, begin: piece.begin, end: piece.end, ranks: [] };
    region.ranks.push(piece.rank);
    found.set(key, region);
  }
  return [...found.values()];
}

/** First dim down, second across; for intervals, the flattened tensor across. */
function Drawing(props: { detail: ParamDetail; regions: readonly Region[] }): ReactNode {
  const { detail, regions } = props;
  const flat = detail.pieces[0]?.region === "interval";
  const sizes = flat ? [1, detail.numel] : detail.shape.length > 1 ? [detail.shape[0]!, detail.shape[1]!] : [1, detail.shape[0] ?? 1];
  const [rows, cols] = [Math.max(1, sizes[0]!), Math.max(1, sizes[1]!)];
  const height = flat || detail.shape.length < 2 ? 40 : Math.min(220, Math.max(60, (WIDTH * rows) / cols));
  return (
    <svg viewBox={`0 0 ${WIDTH} ${height}`} width="100%" role="img" aria-label={`${regions.length} regions of ${detail.shape.join(" by ")}`}>
      {regions.map((region, i) => {
        const two = !flat && detail.shape.length > 1;
        const [y0, y1] = two ? [region.begin[0]!, region.end[0]!] : [0, 1];
        const [x0, x1] = two ? [region.begin[1]!, region.end[1]!] : [region.begin[0] ?? 0, region.end[0] ?? 1];
        const [x, y] = [(x0 / cols) * WIDTH, (y0 / rows) * height];
        const [w, h] = [((x1 - x0) / cols) * WIDTH, ((y1 - y0) / rows) * height];
        const text = region.ranks.length > 4 ? `${region.ranks.length} ranks` : `rank ${region.ranks.join(", ")}`;
        return (
          <g key={region.key}>
            <rect x={x} y={y} width={w} height={h} fill={`var(--series-${(i % 6) + 1})`} fillOpacity={0.22} stroke="var(--panel)" />
            {w > 7 * text.length && h > 14 && (
              <text x={x + w / 2} y={y + h / 2 + 4} textAnchor="middle" fontSize={11} fill="var(--text)">
                {text}
              </text>
            )}
          </g>
        );
      })}
    </svg>
  );
}
