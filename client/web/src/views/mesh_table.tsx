/** All ranks as a table, filtered and sorted in the page. */

import { type ReactNode, useMemo } from "react";

import { bytes, count, duration, plural } from "../lib/format";
import { nextSort } from "../lib/sort";
import { Badge, Panel } from "../ui/bits";
import { patchQuery, useQuery } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";
import { phaseText, type TileData, toneOfRank, wordOf } from "./mesh_tiles";

const COLUMNS: readonly Column<TileData>[] = [
  { key: "rank", title: "rank", width: "4rem", numeric: true, render: (r) => r.rank },
  { key: "state", title: "state", width: "5.4rem", render: (r) => <Badge state={wordOf(r)} tone={toneOfRank(r)} /> },
  { key: "why", title: "what is wrong", width: "minmax(12rem, 2fr)", render: (r) => [r.reason, r.late ? "straggler" : ""].filter(Boolean).join("; ") },
  { key: "phase", title: "phase", width: "9rem", wide: true, render: (r) => phaseText(r.phase) },
  { key: "step", title: "step", width: "5rem", numeric: true, render: (r) => count(r.step) },
  { key: "step_time_ns", title: "step time", width: "5.4rem", numeric: true, render: (r) => duration(r.step_time_ns / 1e9) },
  { key: "age_s", title: "age", width: "5rem", wide: true, numeric: true, render: (r) => duration(r.age_s) },
  { key: "stall_max_ns", title: "longest wait", width: "6.5rem", wide: true, numeric: true, render: (r) => duration(r.stall_max_ns / 1e9) },
  { key: "arena_bytes", title: "parameters", width: "6rem", wide: true, numeric: true, render: (r) => bytes(r.arena_bytes) },
  { key: "sidecar_rss_bytes", title: "sidecar", width: "6rem", wide: true, numeric: true, render: (r) => bytes(r.sidecar_rss_bytes) },
  { key: "host", title: "its host", width: "minmax(8rem, 1fr)", wide: true, render: (r) => <span title={r.host?.why}>{r.host?.why || "–"}</span> },
];
const SORTABLE = new Set(COLUMNS.map((column) => column.key).filter((key) => key !== "why" && key !== "host"));
const keyOf = (rank: TileData): string => String(rank.rank);

export function RankTable(props: {
  ranks: readonly TileData[];
  at: number;
  picked: string;
  onPick: (rank: number) => void;
}): ReactNode {
  const { ranks, picked, onPick } = props;
  const [filter, setFilter] = useQuery("filter");
  const [sort, setSort] = useQuery("sort", "rank");
  const key = sort.replace(/^-/, "");
  const down = sort.startsWith("-");
  const shown = useMemo(() => chosen(ranks, filter, key, down), [ranks, filter, key, down]);
  return (
    <Panel
      title={shown.length === ranks.length ? plural(ranks.length, "rank") : `${count(shown.length)} of ${plural(ranks.length, "rank")}`}
      actions={
        <input
          type="search"
          data-filter
          aria-label="Filter ranks"
          placeholder="rank, state, phase, reason   ( / )"
          value={filter}
          onChange={(event) => setFilter(event.target.value)}
        />
      }
    >
      <Rows
        label="Ranks"
        columns={COLUMNS}
        items={shown}
        keyOf={keyOf}
        selected={picked}
        onPick={(rank) => onPick(rank.rank)}
        onMove={(rank) => patchQuery({ rank: String(rank.rank) }, { replace: true })}
        sort={{ key, down }}
        onSort={(each) => setSort(nextSort(sort, each) || "rank")}
        onClose={() => patchQuery({ rank: "" })}
        sortable={SORTABLE}
        toneOf={toneOfRank}
        height="24rem"
      />
    </Panel>
  );
}

function chosen(ranks: readonly TileData[], filter: string, key: string, down: boolean): TileData[] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = ranks.filter((rank) => {
    const text = `${rank.rank} ${wordOf(rank)} ${phaseText(rank.phase)} ${rank.membership} ${rank.reason} ${rank.late ? "straggler" : ""}`.toLowerCase();
    return words.every((word) => (/^\d+$/.test(word) ? String(rank.rank) === word : text.includes(word)));
  });
  const read = (rank: TileData): string | number => rank[key as keyof TileData] as string | number;
  found.sort((a, b) => (read(a) < read(b) ? -1 : read(a) > read(b) ? 1 : a.rank - b.rank));
  if (down) found.reverse();
  return found;
}
