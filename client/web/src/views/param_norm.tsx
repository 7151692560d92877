/** Norm over steps: the control plane's history and this page's samples, with the edits of the parameter. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { Point } from "../lib/chart";
import { count, plural } from "../lib/format";
import type { Sample } from "../lib/samples";
import type { Happening } from "../lib/timeline";
import { Empty, Panel, Source } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { ModeControls, SeriesChart } from "../ui/series";

export function NormPanel(props: { name: string; samples: readonly Sample[]; events: readonly Happening[] }): ReactNode {
  const { name, samples, events } = props;
  const { job } = useShared();
  const history = usePoll(
    `${job} ${name} norm`,
    (signal) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: "norm", subject: name }, signal }),
    60_000,
  );
  const points = useMemo(() => merged(history.data?.points ?? [], history.data?.incarnation ?? -1, samples), [history.data, samples]);
  const lines = useMemo(() => [{ name: "norm", points }], [points]);
  const noted = history.data?.points.length ?? 0;
  const loading = !history.data && !history.error;
  return (
    <Panel title="Norm over the run" actions={<ModeControls />} source={<Source what={`/history?metric=norm&subject=${encodeURIComponent(name)}`} at={history.at} error={history.error} />}>
      <p className="faint">
        {loading
          ? "Loading the control plane's history …"
          : `${plural(noted, "point")} from the control plane's history${history.data && !history.data.watch ? " (parameter sampling is off)" : ""}, ${count(samples.length)} collected by this page`}
      </p>
      {points.length < 2 && !loading && <Empty>{points.length === 1 ? "Only one point so far." : "No points yet."}</Empty>}
      {points.length >= 2 && points.every((point) => point.value === null) && <Empty>No element was finite at any of these steps, so there is no norm to draw.</Empty>}
      {points.length >= 2 && points.some((point) => point.value !== null) && <SeriesChart label={`Norm of ${name}`} unit="norm" lines={lines} height={220} events={events} />}
    </Panel>
  );
}

function merged(
  noted: readonly { step: number; time_s: number; mean: number | null }[],
  incarnation: number,
  samples: readonly Sample[],
): Point[] {
  const of = new Map<number, Point>();
  for (const point of noted) of.set(point.step, { step: point.step, time_s: point.time_s, value: point.mean });
  for (const sample of samples) {
    if (incarnation >= 0 && sample.incarnation !== incarnation) continue;
    of.set(sample.step, { step: sample.step, time_s: sample.time_s, value: sample.stats.norm });
  }
  return [...of.values()].sort((a, b) => a.step - b.step);
}
