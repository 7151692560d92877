/** What each rank is doing, and which one keeps the others waiting. Asked for, never polled. */

import { type ReactNode, useState } from "react";

import { get } from "../api/client";
import type { RankActivity } from "../api/schema";
import { bytes, count, duration } from "../lib/format";
import { Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { ChartSpace } from "../ui/series";

/** Larger meshes are asked when somebody wants to know: each rank shows its stacks. */
const MOST_AT_ONCE = 64;

export function WhyPanel(props: { world: number }): ReactNode {
  const { job } = useShared();
  const mayRead = useMay("read");
  const [again, setAgain] = useState(0);
  const asked = again > 0 ? again : mayRead && props.world > 0 && props.world <= MOST_AT_ONCE ? -1 : 0;
  const why = usePoll(
    asked !== 0 ? `${job}/why/${asked}` : null,
    (signal) => get("/api/v1/jobs/{job}/why", { path: { job }, signal }),
    0,
  );
  const found = asked !== 0 ? why.data : null;
  return (
    <Panel
      title="Stuck or slow?"
      source={<Source what={`/jobs/${job}/why`} at={why.at} error={why.error} busy={why.busy} />}
      actions={
        <button type="button" disabled={!mayRead || why.busy} onClick={() => setAgain(again + 1)}>
          Ask every rank
        </button>
      }
    >
      {why.error && <Trouble>{why.error}</Trouble>}
      {!found && !why.error && (
        <ChartSpace height={Math.min(8, Math.max(1, props.world)) * 30 + 50}>{!mayRead ? "Needs a reader's token." : asked === 0 ? "Shows what each rank is doing, also while training hangs." : "Asking every rank …"}</ChartSpace>
      )}
      {found && <p><strong>{found.verdict}</strong></p>}
      {found && <Ranks ranks={found.ranks} />}
    </Panel>
  );
}

function Ranks(props: { ranks: readonly RankActivity[] }): ReactNode {
  return (
    <div className="scroll">
      <table className="plain">
        <thead>
          <tr>
            <th>rank</th>
            <th>step</th>
            <th>boundary</th>
            <th>doing</th>
            <th>seen for</th>
            <th>memory</th>
            <th>files</th>
            <th>stack, collectives, output</th>
          </tr>
        </thead>
        <tbody>
          {props.ranks.map((rank) => (
            <tr key={rank.rank}>
              <td>{rank.rank}</td>
              <td>{count(rank.step)}</td>
              <td>{age(rank.boundary_age_s)}</td>
              <td className="wrap">{rank.error || rank.doing}</td>
              <td>{age(rank.seen_for_s)}</td>
              <td>{rank.rss_bytes === null ? "–" : bytes(rank.rss_bytes)}</td>
              <td>{rank.open_file_count === null ? "–" : count(rank.open_file_count)}</td>
              <td className="wrap">
                <details>
                  <summary>{rank.where || rank.missing || "show"}</summary>
                  <pre>{detailsOf(rank)}</pre>
                </details>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function age(seconds: number | null): string {
  return seconds === null ? "–" : duration(seconds);
}

/** As text: stacks and output are the job's own and must not be read as markup. */
export function detailsOf(rank: RankActivity): string {
  const lines: string[] = rank.missing ? [`no stacks: ${rank.missing}`] : [];
  for (const thread of rank.threads.filter((one) => one.training)) {
    lines.push(`thread ${thread.name} (${rank.source})`);
    for (const frame of thread.frames) lines.push(`  ${frame.file}:${frame.line} in ${frame.function}`);
  }
  for (const made of rank.collectives.filter((one) => !one.done)) {
    lines.push(`open: ${made.name} #${made.sequence} of ${made.group}, for ${duration(made.age_s)}`);
  }
  for (const line of rank.log_lines) lines.push(`| ${line}`);
  if (rank.log_missing) lines.push(`no output: ${rank.log_missing}`);
  return lines.join("\n");
}
