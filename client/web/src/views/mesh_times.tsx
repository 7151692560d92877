/** Step time over the run, from the control plane's history. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import { MAX_POINTS } from "../lib/chart";
import type { Happening } from "../lib/timeline";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { ChartSpace, ModeControls, SeriesChart } from "../ui/series";
import { lineOf } from "./logged";

const MAX_LINES = 6;
const NO_EVENTS: readonly Happening[] = [];
/** Above this many ranks the history has only min, median and max over all ranks. */
const MAX_RANKS_NOTED = 64;

export function StepTimes(props: { world: number; incarnation: number; events?: readonly Happening[] }): ReactNode {
  const { world, incarnation, events = NO_EVENTS } = props;
  const { job } = useShared();
  const subjects =
    world > MAX_RANKS_NOTED
      ? ["min", "median", "max"]
      : Array.from({ length: Math.min(world, MAX_LINES) }, (_, i) => String(Math.round((i * (world - 1)) / Math.max(1, Math.min(world, MAX_LINES) - 1))));
  const found = usePoll(
    world > 0 ? `${job}/${incarnation}/times/${world}` : null,
    (signal) =>
      Promise.all(
        subjects.map((subject) =>
          get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: "step_time_s", subject, max_points: MAX_POINTS }, signal }),
        ),
      ),
    30_000,
  );
  // A rank without a finished step reports 0, which is no step time.
  const lines = useMemo(
    () =>
      (found.data ?? []).map((one) => {
        const { points, name } = lineOf(/^\d/.test(one.subject) ? `rank ${one.subject}` : one.subject, one);
        return { name, points: points.filter((point) => point.value).map((point) => ({ ...point, value: 1000 * point.value! })) };
      }),
    [found.data],
  );
  const points = lines.reduce((sum, line) => sum + line.points.length, 0);
  return (
    <Panel
      title="Step time"
      actions={!props.events && <ModeControls />}
      source={<Source what={`/jobs/${job}/history`} at={found.at} error={found.error} busy={found.busy} />}
    >
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.data && points === 0 && <Empty>No data yet; there is a sample every 10 s.</Empty>}
      {!found.data && !found.error && <ChartSpace height={200}>Loading …</ChartSpace>}
      {points > 0 && <SeriesChart label="Step time" unit="ms" lines={lines} height={200} events={events} />}
    </Panel>
  );
}
