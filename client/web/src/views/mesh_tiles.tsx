/** Ranks as tiles: the last axis across, the one before it down, further ones as groups. */

import type { ReactNode } from "react";

import type { RankDocument } from "../api/schema";
import { bytes, count, duration } from "../lib/format";
import { type Axis, coordinates } from "../lib/mesh";
import { toneOf, type Tone } from "../ui/bits";
import { useNow } from "../ui/hooks";

export interface TileData extends RankDocument {
  late: boolean;
  alertCount: number;
  /** Whether the verdict on the job names it. */
  named: boolean;
  /** Whether the control plane no longer answers: what is known of it is old. */
  old: boolean;
}

/** Tone of a rank: by its state, and a warning when the verdict names it; the page has no rule of its own. */
export function toneOfRank(rank: TileData): Tone {
  if (rank.old) return "mute";
  return rank.state === "ok" && rank.named ? "warn" : toneOf(rank.state);
}

/** What is said of a rank's state: "ok" never stands beside an alert of it. */
export function wordOf(rank: TileData): string {
  if (rank.old) return "unknown";
  return rank.state === "ok" && rank.named ? "warning" : rank.state;
}

/** A phase as shown to users. */
export function phaseText(phase: string): string {
  return phase === "forward_backward" ? "computing" : phase;
}

export interface Group {
  label: string;
  ranks: TileData[];
}

/** Groups ranks by their coordinates on all axes but the last two. */
export function groupsOf(ranks: readonly TileData[], axes: readonly Axis[]): Group[] {
  const outer = axes.slice(0, -2);
  const found = new Map<string, Group>();
  for (const rank of ranks) {
    const place = coordinates(rank.rank, axes);
    const label = outer.map((axis, i) => `${axis.name} ${place[i]}`).join(", ");
    const group = found.get(label) ?? { label, ranks: [] };
    group.ranks.push(rank);
    found.set(label, group);
  }
  return [...found.values()];
}

export function Tiles(props: {
  ranks: readonly TileData[];
  axes: readonly Axis[];
  /** When the reports arrived here, Unix time in milliseconds: their ages go on from then. */
  at: number;
  picked: string;
  onPick: (rank: number) => void;
}): ReactNode {
  const { ranks, axes, picked, onPick } = props;
  const now = useNow();
  const olderS = Math.max(0, now - props.at) / 1000;
  const last = axes.at(-1)!;
  const columns = Math.min(last.size, axes.length > 1 ? 16 : 8);
  return (
    <div className="axes">
      {groupsOf(ranks, axes).map((group) => (
        <div key={group.label} className={group.label ? "group" : ""}>
          {group.label && <h3>{group.label}</h3>}
          <div className="tiles" style={{ ["--cols" as string]: columns }}>
            {group.ranks.map((rank) => (
              <Tile key={rank.rank} rank={rank} ageS={rank.age_s + olderS} axes={axes} picked={String(rank.rank) === picked} onPick={onPick} />
            ))}
          </div>
        </div>
      ))}
    </div>
  );
}

function Tile(props: {
  rank: TileData;
  ageS: number;
  axes: readonly Axis[];
  picked: boolean;
  onPick: (rank: number) => void;
}): ReactNode {
  const { rank, axes, picked, onPick } = props;
  const place = coordinates(rank.rank, axes);
  const where = axes.map((axis, i) => `${axis.name} ${place[i]}`).join(", ");
  const notes = [rank.late ? "straggler" : "", rank.late ? (rank.host?.why ?? "") : "", rank.alertCount ? `${rank.alertCount} alert${rank.alertCount > 1 ? "s" : ""}` : ""];
  return (
    <button
      type="button"
      className={`tile ${toneOfRank(rank)}`}
      aria-pressed={picked}
      onClick={() => onPick(rank.rank)}
      title={rank.reason || where}
    >
      <span className="top">
        <span>rank {rank.rank}</span>
        <span className="what">{rank.state === "ok" ? phaseText(rank.phase) : rank.state}</span>
      </span>
      <span className="line">
        <span>step {count(rank.step)}</span>
        <span>{duration(rank.step_time_ns / 1e9)}</span>
      </span>
      <span className="line faint">
        <span>{bytes(rank.arena_bytes)}</span>
        <span>{duration(props.ageS)} old</span>
      </span>
      <span className="faint">{rank.reason || notes.filter(Boolean).join(", ") || where}</span>
    </button>
  );
}
