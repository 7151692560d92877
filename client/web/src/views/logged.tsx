/** Numbers that the script logs (`attachment.log`), from the control plane's history: many small charts. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { HistoryDocument } from "../api/schema";
import { agreed, type Line, MAX_POINTS } from "../lib/chart";
import { clock, number } from "../lib/format";
import type { Happening } from "../lib/timeline";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";
import { ChartSpace, SeriesChart } from "../ui/series";

const PREFIX = "log:";
/** Ranks asked for each number: few of many charts, more of one. */
const MAX_LINES = 8;
const MANY_LINES = 3;
const FIRST_CHARTS = 4;
const MAX_CHARTS = 12;
const NONE = "none";

/** Metrics of logged numbers among all series, each with the ranks that log it. */
export function loggedOf(series: readonly { metric: string; subject: string }[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const { metric, subject } of series) {
    if (metric.startsWith(PREFIX)) found.set(metric, [...(found.get(metric) ?? []), subject]);
  }
  return found;
}

/** The metrics that the address names, else the first ones. */
export function chosenOf(text: string, all: readonly string[]): string[] {
  if (text === NONE) return [];
  const named = text.split("~").filter((one) => all.includes(one));
  return named.length ? named.slice(0, MAX_CHARTS) : all.slice(0, FIRST_CHARTS);
}

export function lineOf(name: string, found: HistoryDocument): Line {
  return { name, points: found.points.map(({ step, time_s, mean, count }) => ({ step, time_s, value: mean, count })) };
}

/** Where a logged number stands: of the first rank that logs it. */
function Last(props: { of: HistoryDocument | undefined }): ReactNode {
  const point = props.of?.points.at(-1);
  if (!point) return "–";
  return <span title={`rank ${props.of?.subject}, at ${clock(point.time_s)}`}>{point.mean === null ? "not finite" : number(point.mean, 5)}</span>;
}

export interface Logged {
  /** Ranks that log it, by metric. */
  of: ReadonlyMap<string, string[]>;
  loaded: boolean;
  at: number;
  error: string | null;
  busy: boolean;
}

/** Which numbers a run's script logs. */
export function useLogged(incarnation: number): Logged {
  const { job } = useShared();
  const series = usePoll(
    `${job}/${incarnation}/series`,
    (signal) => get("/api/v1/jobs/{job}/history/series", { path: { job }, query: { limit: 5000 }, signal }),
    30_000,
  );
  return useMemo(
    () => ({ of: loggedOf(series.data?.series ?? []), loaded: series.data !== null, at: series.at, error: series.error, busy: series.busy }),
    [series.data, series.at, series.error, series.busy],
  );
}

/** The number that is the loss: by its name, else by a part of it. */
export function lossOf(logged: ReadonlyMap<string, string[]>): { name: string; metric: string; subject: string } | null {
  const names = [...logged.keys()].map((metric) => metric.slice(PREFIX.length));
  const name = names.find((one) => one.toLowerCase() === "loss") ?? names.find((one) => /loss/i.test(one));
  const subject = name === undefined ? undefined : logged.get(PREFIX + name)?.[0];
  return name === undefined || subject === undefined ? null : { name, metric: PREFIX + name, subject };
}

export function LoggedNumbers(props: { logged: Logged; incarnation: number; events: readonly Happening[] }): ReactNode {
  const { job } = useShared();
  const [picked, setPicked] = useQuery("number");
  const series = props.logged;
  const logged = series.of;
  const names = useMemo(() => [...logged.keys()].map((one) => one.slice(PREFIX.length)), [logged]);
  const chosen = chosenOf(picked, names);
  const wanted = chosen.map((name) => {
    const ranks = logged.get(PREFIX + name) ?? [];
    return { name, total: ranks.length, ranks: ranks.slice(0, chosen.length > 2 ? MANY_LINES : MAX_LINES) };
  });
  const found = usePoll(
    wanted.length ? `${job}/${props.incarnation}/${wanted.map((one) => `${one.name} ${one.ranks.join()}`).join("/")}` : null,
    (signal) =>
      Promise.all(
        wanted.map(async ({ name, ranks, total }) => {
          const asked = ranks.map((subject) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: PREFIX + name, subject, max_points: MAX_POINTS }, signal }));
          const documents = await Promise.all(asked);
          return { name, total, documents, lines: agreed(documents.map((one) => lineOf(`rank ${one.subject}`, one))) };
        }),
      ),
    10_000,
  );
  const turn = (name: string): void => {
    const next = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name];
    setPicked(next.join("~") || NONE);
  };
  return (
    <Panel
      title="Logged metrics"
      source={<Source what={`/jobs/${job}/history/series`} at={found.at || series.at} error={series.error ?? found.error} busy={found.busy} />}
    >
      {(series.error ?? found.error) && <Trouble>{series.error ?? found.error}</Trouble>}
      {!series.loaded && !series.error && <ChartSpace height={250}>Loading …</ChartSpace>}
      {series.loaded && names.length === 0 && <Empty>None so far. A script logs them with attachment.log(loss=loss).</Empty>}
      {names.length > 1 && (
        <div className="choice many" role="group" aria-label="Metrics">
          {names.map((name) => (
            <button key={name} type="button" aria-pressed={chosen.includes(name)} disabled={!chosen.includes(name) && chosen.length >= MAX_CHARTS} onClick={() => turn(name)}>
              {name}
            </button>
          ))}
        </div>
      )}
      <div className={chosen.length > 1 ? "charts" : ""}>
        {chosen.map((name) => {
          const one = found.data?.find((each) => each.name === name);
          const shown = one?.lines.some((line) => line.points.length > 0);
          return (
            <section key={name} aria-label={name}>
              <h3 className="bar-row">
                <span>{name}</span> <strong className="num"><Last of={one?.documents[0]} /></strong>
                {one && one.lines.length > 1 && one.total > one.lines.length && <span className="faint">the first {one.lines.length} of {one.total} ranks</span>}
                {one && one.lines.length === 1 && one.documents.length > 1 && <span className="faint">{one.documents.length < one.total ? `ranks looked at agree: ${one.documents.length} of ${one.total}` : `all ${one.total} ranks agree`}</span>}
              </h3>
              {one && shown ? (
                <SeriesChart label={`${name} over the run`} unit="" lines={one.lines} height={chosen.length > 1 ? 170 : 220} events={props.events} small={chosen.length > 1} />
              ) : (
                <ChartSpace height={chosen.length > 1 ? 170 : 220}>{one ? "No point yet." : "Loading …"}</ChartSpace>
              )}
            </section>
          );
        })}
      </div>
    </Panel>
  );
}
