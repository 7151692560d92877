/** Overview: is it healthy, what changed, who changed it. */

import { type ReactNode, useEffect, useMemo, useState } from "react";

import { get, urlOf } from "../api/client";
import type { JobSummary } from "../api/schema";
import { follow } from "../api/sse";
import type { Cause } from "../lib/causes";
import type { Point } from "../lib/chart";
import { clock, count, duration, number, plural } from "../lib/format";
import type { Frame } from "../lib/grads";
import { median, stragglers } from "../lib/mesh";
import { placeHash } from "../lib/route";
import { badCount } from "../lib/stats";
import { drawnOf, type Happening } from "../lib/timeline";
import { Badge, Facts, Panel, Source, Trouble } from "../ui/bits";
import { useShared, whyDead } from "../ui/context";
import { useNow, usePoll } from "../ui/hooks";
import { ModeControls, SeriesChart } from "../ui/series";
import { CauseItem } from "./causes";
import { type Logged, LoggedNumbers, lossOf, useLogged } from "./logged";
import { pollMs } from "./mesh";
import { StepTimes } from "./mesh_times";
import { Remains } from "./remains";
import { type History, Timeline, useHistory } from "./timeline";
import { TurnOn } from "./watching";

const CAUSES_SHOWN = 5;
/** Norms of more gradients are not followed without being asked for. */
const MAX_FOLLOWED = 500;

export default function Overview(): ReactNode {
  const { job, summary, health } = useShared();
  const logged = useLogged(summary?.incarnation ?? -1);
  const total = useTotal(job, summary?.state);
  const history = useHistory();
  const events = useMemo(() => drawnOf(history.timeline), [history.timeline]);
  return (
    <>
      <div className="head">
        <h1>{job}</h1>
        {summary && (
          <span className="faint">
            run {summary.incarnation}, {standing(summary)}
          </span>
        )}
        <span className="sources" role="group" aria-label="Charts">
          <ModeControls />
        </span>
      </div>
      <section className={`panel verdict ${health.tone}`} aria-label="Health" role="status">
        <Badge state={health.word} tone={health.tone} />
        <p className="wrap">{health.why || WAITING}</p>
        {health.word !== "unknown" && <TurnOn />}
      </section>
      <Ended history={history} />
      <Firing history={history} />
      {summary?.state === "ended" && <Remains />}
      <Numbers total={total} logged={logged} causes={history.causes} />
      <LoggedNumbers logged={logged} incarnation={summary?.incarnation ?? -1} events={events} />
      <Timeline history={history} />
      <StepTimes world={summary?.world_size ?? 0} incarnation={summary?.incarnation ?? -1} events={events} />
      {total.points.length > 1 && <GradientNorm total={total} events={events} />}
    </>
  );
}

/** How many of the job's processes there are. */
function standing(summary: JobSummary): string {
  if (summary.state === "ended") return plural(summary.world_size, "rank");
  if (summary.state !== "starting" && summary.alive_count < summary.world_size) return `${count(summary.alive_count)} of ${plural(summary.world_size, "trainer")} alive`;
  return `${count(summary.joined_count)} of ${plural(summary.world_size, "rank")}`;
}

/** What is left to be seen of a training that is over. */
function Ended(props: { history: History }): ReactNode {
  const { job, summary } = useShared();
  if (summary?.state !== "ended") return null;
  const run = props.history.runs.find((one) => one.incarnation === summary.incarnation);
  const step = Math.max(run?.step ?? -1, summary.step);
  return (
    <section className="panel" aria-label="The end">
      <p>
        <strong>Training ended{step >= 0 ? ` at step ${count(step)}` : ""}</strong>
        {run?.ended_s ? `, ${clock(run.ended_s)}, after ${duration(run.ended_s - run.began_s)}` : ""}
        {run?.reason ? `: ${run.reason}` : ""}. Its last values and checkpoints, and what was logged and changed, are below; <code>paramd dashboard --job {job}</code> shows it again, at the address that the job had and that its next start has.
      </p>
    </section>
  );
}

function Firing(props: { history: History }): ReactNode {
  const { history } = props;
  const { job, summary } = useShared();
  const paused = summary?.pause !== undefined && summary.pause !== "running" && summary.pause !== "";
  const firing = history.causes.filter((cause) => cause.firing > 0);
  if (firing.length === 0) return null;
  return (
    <Panel
      title={`What is wrong: ${plural(firing.length, "cause")}, the first one first`}
      actions={<a href={placeHash({ job, view: "alerts", query: { state: "firing" } })}>all alerts</a>}
    >
      {paused && (
        <p>
          Training is {summary?.pause}: <a href={placeHash({ job, view: "edits", query: {} })}>roll back to a restore point, or resume it</a>
        </p>
      )}
      <ul className="bare" aria-label="Causes">
        {firing.slice(0, CAUSES_SHOWN).map((cause) => (
          <CauseItem key={cause.id} cause={cause} />
        ))}
      </ul>
    </Panel>
  );
}

/** Last of the page: it begins when the first norms are there, and moves nothing. */
function GradientNorm(props: { total: Total; events: readonly Happening[] }): ReactNode {
  const { points } = props.total;
  const line = useMemo(() => [{ name: "gradient norm", points }], [points]);
  return (
    <Panel title="Gradient norm" source={<Source what="gradients" at={1000 * (points.at(-1)?.time_s ?? 0)} step={points.at(-1)?.step} />}>
      <SeriesChart label="Gradient norm over the run" unit="gradient norm" lines={line} height={170} events={props.events} small />
    </Panel>
  );
}

/** How old a number is, and of which step. */
function Moment(props: { point: Point | undefined; text?: string }): ReactNode {
  const { point, text = "" } = props;
  const now = useNow();
  if (!point) return null;
  const age = Math.max(0, now / 1000 - point.time_s);
  return (
    <small className="faint">
      {text}
      {point.step >= 0 ? `step ${count(point.step)}, ` : ""}
      {age < 1.5 ? "now" : `${duration(Math.round(age))} ago`}
    </small>
  );
}

function Numbers(props: { total: Total; logged: Logged; causes: readonly Cause[] }): ReactNode {
  const { total, causes } = props;
  const { job, summary, live } = useShared();
  const loss = useLoss(props.logged);
  const world = summary?.world_size ?? 0;
  const ranks = usePoll(
    world && summary?.state !== "ended" ? `${job}/ranks` : null,
    (signal) => get("/api/v1/jobs/{job}/ranks", { path: { job }, signal }),
    pollMs(world),
  );
  const all = ranks.data?.ranks ?? [];
  const named = summary?.verdict.ranks;
  const late = useMemo(() => [...stragglers(causes.flatMap((cause) => cause.alerts), new Set(named))], [causes, named]);
  const middle = median(all.filter((rank) => rank.step_time_ns > 0).map((rank) => rank.step_time_ns)) / 1e9;
  const loading = !ranks.data && !ranks.error;
  const [dead, over] = [whyDead(summary) !== "", summary?.state === "ended"];
  const paused = summary?.pause === "paused" && !dead;
  const step = Math.max(summary?.step ?? -1, live.incarnation === summary?.incarnation ? live.step : -1, total.points.at(-1)?.step ?? -1);
  return (
    <Panel title="Now" source={<Source what={`/jobs/${job}/ranks`} at={ranks.at} error={ranks.error} busy={ranks.busy} refresh={ranks.refresh} />}>
      {ranks.error && <Trouble>{ranks.error}</Trouble>}
      <Facts
        large
        rows={[
          [over ? "last step" : "step", step >= 0 ? count(step) : "–"],
          ["steps per second", dead || over ? "–" : paused ? "0, paused" : Number.isFinite(middle) ? number(1 / middle, 3) : "–"],
          [loss.name || "loss", <>{loss.shown} <Moment point={loss.point} /></>],
          ["gradient norm", <>{total.shown} <Moment point={total.points.at(-1)} /></>],
        ]}
      />
      {!over && (
        <Facts
          rows={[
            ["median step time", dead ? "–" : paused ? `${duration(middle)} before the pause` : duration(middle)],
            ["stragglers", loading ? "…" : dead || !ranks.data ? "–" : late.length ? late.map((rank) => <a key={rank} className="spaced" href={placeHash({ job, view: "mesh", query: { rank: String(rank) } })}>rank {rank}</a>) : "none"],
            ["learning rates", <a key="lr" href={placeHash({ job, view: "edits", query: {} })}>see and set</a>],
            ["training", dead ? "–" : (summary?.pause ?? "–")],
            ["memory", <a key="m" href={placeHash({ job, view: "mesh", query: {} })}>of all ranks</a>],
          ]}
        />
      )}
    </Panel>
  );
}

/** The last loss that the script logged: of the first rank that logs it. */
function useLoss(logged: Logged): { name: string; shown: string; point: Point | undefined } {
  const { job, summary } = useShared();
  const loss = lossOf(logged.of);
  const found = usePoll(
    loss ? `${job}/${summary?.incarnation}/${loss.metric}/${loss.subject}` : null,
    (signal) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: loss!.metric, subject: loss!.subject }, signal }),
    summary?.state === "ended" ? 0 : 10_000,
  );
  const last = found.data?.points.at(-1);
  if (!loss) return { name: "", shown: logged.busy ? WAITING : "none logged", point: undefined };
  if (!last) return { name: loss.name, shown: found.error ? "not known" : WAITING, point: undefined };
  return { name: loss.name, shown: last.mean === null ? "not finite" : number(last.mean, 5), point: { step: last.step, time_s: last.time_s, value: last.mean } };
}

const WAITING = "…";
/** What is kept of the gradients is asked for this often, where the page does not follow them itself. */
const KEPT_EVERY_MS = 10_000;
const KEPT_S = 3600;
/** Norms kept of the gradients while the page is open. */
const MAX_NORMS = 600;

interface Total {
  shown: ReactNode;
  points: readonly Point[];
}

type Tell = (shown: ReactNode, point?: Point) => void;

/** The norm of all gradients, every tenth update, where following them is cheap. */
function useTotal(job: string, state: string | undefined): Total {
  const [known, ended] = [state !== undefined, state === "ended"];
  const [total, setTotal] = useState<Total>({ shown: WAITING, points: [] });
  useEffect(() => {
    if (!known) return;
    const controller = new AbortController();
    void begin(job, ended, controller.signal, (shown, point) =>
      setTotal(({ points }) => ({ shown, points: point === undefined ? points : [...points.slice(1 - MAX_NORMS), point] })),
    );
    return () => {
      controller.abort();
      setTotal({ shown: WAITING, points: [] });
    };
  }, [job, known, ended]);
  return total;
}

async function begin(job: string, ended: boolean, signal: AbortSignal, tell: Tell): Promise<void> {
  let last_s = ended ? 0 : Date.now() / 1000 - KEPT_S;
  /** What the control plane has kept: no waiting for the next update, and a past. How many points there were. */
  const kept = async (): Promise<number> => {
    try {
      const found = await get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: "grad_norm", subject: "total", begin_s: last_s }, signal });
      const fresh = found.points.filter((point) => point.time_s > last_s);
      for (const { mean, step, time_s } of fresh) tell(number(mean), { step, time_s, value: mean });
      last_s = fresh.at(-1)?.time_s ?? last_s;
      return fresh.length;
    } catch {
      return 0; // there may be none
    }
  };
  const had = await kept();
  if (ended) return had ? undefined : tell("not kept");
  try {
    const page = await get("/api/v1/jobs/{job}/params", { path: { job }, query: { limit: 1 }, signal });
    if (page.total_count > MAX_FOLLOWED) {
      // Too many to be followed unasked; what the control plane samples costs nothing more.
      if (!had) tell(<a href={placeHash({ job, view: "grads", query: {} })}>see Gradients</a>);
      while (!signal.aborted) {
        await new Promise((done) => setTimeout(done, KEPT_EVERY_MS));
        if (!signal.aborted) await kept();
      }
      return;
    }
  } catch {
    if (!signal.aborted) tell("not known");
    return;
  }
  const url = urlOf("/api/v1/jobs/{job}/grads", { job }, { filter: "*", every: 10 });
  const onEvent = (event: { kind: string; data: string }): void => {
    if (event.kind === "end") return tell("not known");
    if (event.kind !== "frame") return;
    const frame = JSON.parse(event.data) as Frame;
    const { norm } = frame.total;
    if (badCount(frame.total) || norm === null) tell(<Badge state="not finite" tone="bad" />);
    else tell(number(norm), { step: frame.step, time_s: Date.now() / 1000, value: norm });
  };
  await follow(url, { onEvent, onState: () => undefined }, signal);
}
