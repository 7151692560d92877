/** Live gradient statistics per update; marks gradients that vanish, explode or are non-finite. */

import { type ReactNode, useEffect, useMemo, useReducer, useState } from "react";

import { get, urlOf } from "../api/client";
import { follow, type ServerEvent } from "../api/sse";
import { count, number, plural } from "../lib/format";
import { type Frame, type GradRow, type Grads, type Mark, NO_GRADS, withFrame } from "../lib/grads";
import { substrings } from "../lib/filters";
import { placeHash } from "../lib/route";
import { nextSort, sortedBy } from "../lib/sort";
import { badCount, badText, COLUMNS as STATS, facts, text, valueOf } from "../lib/stats";
import { Badge, Choice, Empty, Facts, Name, Panel, Source, Spark, type Tone, Trouble } from "../ui/bits";
import { axis, Chart } from "../ui/chart";
import { useShared } from "../ui/context";
import { usePoll, useQuery, useSettled } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";
import { ChartSpace, ModeControls, SeriesChart } from "../ui/series";
import { Over } from "./remains";

const TONES: Record<Mark, Tone> = {
  "": "ok",
  none: "mute",
  vanishing: "warn",
  exploding: "bad",
  "non-finite": "bad",
};
/** Least time between two draws, however fast frames arrive. */
const DRAW_MS = 250;

interface Following {
  grads: Grads;
  at: number;
  problem: string | null;
}

export default function Gradients(): ReactNode {
  if (useShared().summary?.state !== "ended") return <Live />;
  return (
    <>
      <div className="head">
        <h1>Gradients</h1>
      </div>
      <Over what="their gradients" />
    </>
  );
}

function Live(): ReactNode {
  const { job } = useShared();
  const [filter, setFilter] = useQuery("filter");
  const [every, setEvery] = useQuery("every", "1");
  const [paused, setPaused] = useState(false);
  const [name, setName] = useQuery("name");
  const [marked, setMarked] = useQuery("marked", "all");
  const asked = useSettled(filter, 300);
  const { grads, at, problem } = useGrads(job, asked, every, paused);
  const told = useTold();
  const [sort, setSort] = useQuery("sort");
  const known = useMemo(
    () => [...grads.rows.values()].map((row) => (row.mark === "" && told.has(row.name) ? { ...row, mark: told.get(row.name)! } : row)),
    [grads, told],
  );
  const rows = useMemo(() => {
    const shown = marked === "all" ? known : known.filter((row) => row.mark !== "" || row.firstBad !== null);
    return sortedBy(shown, sort, keyOf);
  }, [known, marked, sort]);
  const order = useMemo(() => ({ key: sort.replace(/^-/, ""), down: sort.startsWith("-") }), [sort]);
  const chosen = grads.rows.get(name);
  const lines = useMemo(() => [{ name: "norm of all gradients", points: grads.totals.map(([step, value, time_s]) => ({ step, time_s, value })) }], [grads.totals]);
  const wrong = [...grads.rows.values()].filter((row) => row.mark === "non-finite" || row.firstBad !== null);
  return (
    <>
      <div className="head">
        <h1>Gradients</h1>
        <Source what={`/jobs/${job}/grads`} at={at} step={grads.step} incarnation={grads.incarnation} error={problem} busy />
      </div>
      <div className="bar-row">
        <div className="grow">
          <input type="search" data-filter spellCheck={false} aria-label="Filter" placeholder="layers.*.weight   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />
        </div>
        <Choice label="Every n-th step" value={every} options={[["1", "every step"], ["10", "10th"], ["100", "100th"]] as const} onChange={setEvery} />
        <Choice label="Show" value={marked} options={[["all", "all"], ["marked", "marked"]] as const} onChange={setMarked} />
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>
          {paused ? "Follow" : "Stop following"}
        </button>
      </div>
      {problem && <Trouble>{problem}</Trouble>}
      {wrong.length > 0 && <Broken rows={wrong} />}
      <Panel title="All gradients" actions={<ModeControls />} source={<span className="source">{plural(grads.frames, "frame")}, {count(grads.dropped)} dropped</span>}>
        {grads.total === null && (problem ? <Empty>No frame received; see the reason above.</Empty> : <ChartSpace height={330}>Waiting for the next update …</ChartSpace>)}
        {grads.total && (
          <Facts
            rows={[
              ...facts(grads.total),
              ["NaN, Inf", badText(grads.total)],
              ["loss scale", number(grads.scale)],
              ["clipped by", grads.clip === null ? "unknown" : number(grads.clip)],
            ]}
          />
        )}
        {grads.totals.length > 1 && grads.totals.every(([, norm]) => norm === null) && (
          <Empty>No update since this page was opened had a finite gradient, so there is no norm to draw.</Empty>
        )}
        {grads.totals.length > 1 && grads.totals.some(([, norm]) => norm !== null) && (
          <SeriesChart label="Norm of all gradients" unit="norm" lines={lines} height={180} />
        )}
      </Panel>
      {rows.length === 0 && grads.rows.size > 0 && filter && marked === "all" && <Empty>No gradient matches the filter.</Empty>}
      {rows.length === 0 && grads.rows.size > 0 && marked !== "all" && <Empty>None is marked: no gradient vanishes, explodes or is non-finite.</Empty>}
      {rows.length > 0 && <Rows label="Gradients" columns={COLUMNS} items={rows} keyOf={(row) => row.name} selected={name} sort={order} sortable={SORTABLE} onSort={(key) => setSort(nextSort(sort, key))} onPick={(row) => setName(row.name)} onClose={() => setName("")} toneOf={(row) => TONES[row.mark]} height="28rem" />}
      {chosen && <One row={chosen} />}
    </>
  );
}

const COLUMNS: readonly Column<GradRow>[] = [
  { key: "name", title: "name", width: "minmax(8.5rem, 2fr)", render: (row) => <Name>{row.name}</Name> },
  ...STATS.map((one): Column<GradRow> => ({
    key: one.title,
    title: one.title,
    width: one.width!,
    numeric: true,
    wide: one.wide ?? false,
    render: (row) => (one.key === "norm" && row.last.none !== null ? <span title={row.last.none}>none</span> : text(one, row.last)),
  })),
  { key: "spark", title: "last norms", width: "6.5rem", wide: true, render: (row) => <Spark values={row.norms} /> },
  { key: "nan", title: "NaN/Inf", width: "5rem", numeric: true, wide: true, render: (row) => count(badCount(row.last)) },
  { key: "mark", title: "state", width: "minmax(5.6rem, 1fr)", render: (row) => (row.mark ? <Badge state={row.mark} tone={TONES[row.mark]} /> : row.firstBad !== null ? `was non-finite at ${count(row.firstBad)}` : <span className="faint">ok</span>) },
];

const SORTABLE: ReadonlySet<string> = new Set(["name", "nan", "mark", ...STATS.map((one) => one.title)]);

/** What a row is sorted by; null where it is not known. */
function keyOf(row: GradRow, key: string): string | number | null {
  if (key === "name") return row.name;
  if (key === "mark") return row.mark || null;
  if (row.last.none !== null) return null;
  if (key === "nan") return badCount(row.last);
  const one = STATS.find((each) => each.title === key);
  return one ? (valueOf(one, row.last) ?? null) : null;
}

/** Gradients that the control plane finds exploding or vanishing, from norms that it kept before this page was opened. */
function useTold(): ReadonlyMap<string, Mark> {
  const { job, live } = useShared();
  const found = usePoll(
    `${job} alerts firing`,
    (signal) => get("/api/v1/jobs/{job}/alerts", { path: { job }, query: { state: "firing", limit: 1000 }, signal }),
    30_000,
    live.changes["alert"] ?? 0,
  );
  return useMemo(() => {
    const jumps = (found.data?.alerts ?? []).filter((alert) => alert.rule === "gradient-jump");
    return new Map(jumps.map((alert) => [alert.name, alert.reason.includes("vanishes") ? "vanishing" : "exploding"]));
  }, [found.data]);
}

function useGrads(job: string, filter: string, every: string, paused: boolean): Following {
  const [grads, dispatch] = useReducer(
    (old: Grads, frames: readonly Frame[] | null) => (frames ? frames.reduce(withFrame, old) : NO_GRADS),
    NO_GRADS,
  );
  const [state, setState] = useState<{ at: number; problem: string | null }>({ at: 0, problem: null });
  useEffect(() => dispatch(null), [job, filter]);
  useEffect(() => {
    if (paused) return;
    const controller = new AbortController();
    let waiting: Frame[] = [];
    let ended = "";
    const flush = window.setInterval(() => {
      if (waiting.length === 0) return;
      dispatch(waiting);
      waiting = [];
    }, DRAW_MS);
    const onEvent = (event: ServerEvent): void => {
      if (event.kind === "end") {
        ended = (JSON.parse(event.data) as { detail: string }).detail;
        setState((old) => ({ ...old, problem: ended }));
      }
      if (event.kind !== "frame") return;
      ended = "";
      waiting.push(JSON.parse(event.data) as Frame);
      setState({ at: Date.now(), problem: null });
    };
    // The server's reason for ending the stream outranks the connection's state until the next frame.
    const onState = (problem: string | null): void => setState((old) => ({ ...old, problem: ended || problem }));
    const url = urlOf("/api/v1/jobs/{job}/grads", { job }, { filter: substrings(filter), every, kind: "histogram" });
    void follow(url, { onEvent, onState }, controller.signal);
    return () => {
      controller.abort();
      window.clearInterval(flush);
    };
  }, [job, filter, every, paused]);
  return { grads, ...state };
}

/** Gradients with non-finite elements, since which step and on which ranks. */
function Broken(props: { rows: readonly GradRow[] }): ReactNode {
  return (
    <Panel title={`${count(props.rows.length)} not finite`}>
      <ul className="bare list-small" tabIndex={0} aria-label="Not finite">
        {props.rows.slice(0, 50).map((row) => (
          <li key={row.name}>
            <Name>{row.name}</Name> first seen at step {count(row.firstBad ?? -1)}
            {row.firstBadRanks.length > 0 ? ` on rank ${row.firstBadRanks.join(", ")}` : ""}
            {row.mark === "non-finite"
              ? `, now ${count(row.last.nan_count ?? 0)} NaN and ${count(row.last.inf_count ?? 0)} Inf`
              : ", finite again"}
          </li>
        ))}
      </ul>
    </Panel>
  );
}

function One(props: { row: GradRow }): ReactNode {
  const { row } = props;
  const { job, dark } = useShared();
  const exponents = row.last.exponents ?? [];
  const counted = exponents.reduce((sum, [, n]) => sum + n, 0);
  return (
    <Panel
      title={<Name className="wrap">{row.name}</Name>}
      actions={<a href={placeHash({ job, view: "params", query: { name: row.name } })}>show parameter</a>}
    >
      <Facts rows={facts(row.last)} />
      {counted === 0 && row.last.none === null && (
        <Empty>{badCount(row.last) > 0 ? "No element is finite, so there are no magnitudes to draw." : "Every element is zero."}</Empty>
      )}
      {exponents.length > 0 && counted > 0 && (
        <Chart
          label="Binary exponents of the gradient's elements"
          height={200}
          deps={[exponents, dark]}
          option={(ink) => ({
            xAxis: axis(ink, "binary exponent e of 2^e ≤ |x|", { type: "value", scale: true }),
            yAxis: axis(ink, "elements", { type: "value", nameGap: 50 }),
            series: [{ type: "line", step: "middle", showSymbol: false, areaStyle: { opacity: 0.2 }, data: exponents.map(([e, n]) => [e, n]) }],
          })}
        />
      )}
    </Panel>
  );
}
