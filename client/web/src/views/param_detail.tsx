/** One parameter: statistics now and over steps, heat map, placement, values. */

import { type ReactNode, useEffect, useMemo, useRef } from "react";

import { get } from "../api/client";
import { literal } from "../lib/filters";
import { clock, count, plural, shape } from "../lib/format";
import { placeHash } from "../lib/route";
import { editsOf } from "../lib/edits";
import { drawnOf, type Happening, timelineOf } from "../lib/timeline";
import { badCount, badText, facts as statFacts, type Stats } from "../lib/stats";
import { Badge, Choice, Empty, Facts, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { Tick } from "../ui/form";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";
import { Compare } from "./param_compare";
import { HeatPanel } from "./param_heat";
import { HistogramPanel } from "./param_histogram";
import { NormPanel } from "./param_norm";
import { Pieces } from "./param_pieces";
import { useSamples } from "./param_samples";
import { SpectrumPanel } from "./param_spectrum";
import { States } from "./param_states";
import { Values } from "./param_values";

const PARTS = [
  ["numbers", "Numbers"],
  ["heat", "Heat map"],
  ["spectrum", "Spectrum"],
  ["where", "Placement"],
  ["values", "Values"],
  ["compare", "Compare"],
] as const;
type Part = (typeof PARTS)[number][0];

export function ParamDetail(props: { name: string }): ReactNode {
  const { name } = props;
  const { job, session } = useShared();
  const box = useRef<HTMLDivElement>(null);
  // Below the list on narrow screens.
  useEffect(() => {
    if (window.matchMedia("(max-width: 1100px)").matches) box.current?.scrollIntoView({ block: "start" });
  }, [name]);
  const mayRead = useMay("read");
  const mayEdit = useMay("edit");
  const edited = useEdits(name);
  const events = useMemo(() => drawnOf(edited), [edited]);
  const [part, setPart] = useQuery("part", "numbers");
  const [collecting, setCollecting] = useQuery("collect", "on");
  const detail = usePoll(
    `${job} ${name}`,
    (signal) => get("/api/v1/jobs/{job}/params/detail", { path: { job }, query: { name: literal(name) }, signal }),
    0,
  );
  const found = useSamples(name, collecting === "on");
  const last = found.samples.at(-1);
  const offered = PARTS.filter(([each]) => mayRead || (each !== "heat" && each !== "values" && each !== "spectrum"));
  const facts = detail.data;
  return (
    <div className="detail" ref={box}>
      <Panel
        title={<Name className="wrap">{name}</Name>}
        source={<Source what={`/params/stats?filter=${encodeURIComponent(`"${name}"`)}`} at={found.at} step={last?.step} incarnation={last?.incarnation} error={found.error} />}
        actions={
          <>
          {mayEdit && (
            <a className="button" href={placeHash({ job, view: "edits", query: { pattern: literal(name) } })}>
              Edit this …
            </a>
          )}
          <button type="button" className="quiet" aria-label="Close the detail" onClick={() => patchQuery({ name: "", part: "" })}>
            ✕
          </button>
          </>
        }
      >
        {detail.error && <Trouble>{detail.error}</Trouble>}
        {found.error && !detail.error && <Trouble>{found.error}</Trouble>}
        {facts && (
          <Facts
            rows={[
              ["shape", shape(facts.shape)],
              ["elements", count(facts.numel)],
              ["dtype", facts.dtype],
              ["placement", facts.placement],
              ["kind", facts.kind],
              ...(facts.trainable === null ? [] : [["trainable", facts.trainable ? "yes, at attach" : "no, frozen at attach"] as [string, string]]),
              ...(facts.aliases.length ? [["tied with", facts.aliases.join(", ")] as [string, string]] : []),
              ...(last ? statRows(last.stats) : []),
            ]}
          />
        )}
        {edited.length > 0 && (
          <ul className="bare list-small" tabIndex={0} aria-label="Edits of this parameter">
            {edited.map((one) => (
              <li key={one.key}>
                <span className="faint">{clock(one.time_s)}</span> <Badge state={one.state} /> <a href={placeHash({ job, view: "edits", query: one.query })}>{one.what}</a>{" "}
                <span className="faint">
                  {one.step >= 0 ? `step ${count(one.step)}, ` : ""}by {one.who}
                </span>
              </li>
            ))}
          </ul>
        )}
      </Panel>
      {facts && (
      <div className="bar-row">
        <Choice label="Part" value={part as Part} options={offered} onChange={setPart} />
        <Tick label="sample every 5 s" checked={collecting === "on"} onChange={(checked) => setCollecting(checked ? "on" : "off")} />
        <span className="faint">{plural(found.samples.length, "sample")}</span>
      </div>
      )}
      {part === "numbers" && facts && (
        <>
          <HistogramPanel samples={found.samples} />
          <NormPanel name={name} samples={found.samples} events={events} />
        </>
      )}
      {!mayRead && (part === "heat" || part === "values") && (
        <Panel title={part === "heat" ? "Heat map" : "Values"}>
          <Empty>Values are for readers; this token has the role {session.role}. Numbers and placement are open to it.</Empty>
        </Panel>
      )}
      {part === "heat" && facts && mayRead && <HeatPanel name={name} shape={facts.shape} />}
      {part === "spectrum" && facts && mayRead && <SpectrumPanel name={literal(name)} shape={facts.shape} />}
      {part === "where" && facts && <Pieces detail={facts} at={detail.at} />}
      {part === "values" && facts && mayRead && <Values name={name} shape={facts.shape} />}
      {part === "compare" && facts && <Compare samples={found.samples} keep={found.keep} mayRead={mayRead} />}
      {part === "compare" && facts && mayRead && <States only={name} />}
    </div>
  );
}

/** What changed this parameter on purpose, newest first. */
function useEdits(name: string): readonly Happening[] {
  const { job, live } = useShared();
  const found = usePoll(
    `${job} edits`,
    (signal) => get("/api/v1/jobs/{job}/edits", { path: { job }, query: { limit: 100 }, signal }),
    60_000,
    live.changes["edit"] ?? 0,
  );
  return useMemo(
    () => timelineOf({ edits: editsOf(name, found.data?.edits ?? []), marks: [], exports: [], incarnations: [], causes: [], recent: [] }),
    [name, found.data],
  );
}

function statRows(stats: Stats): [string, ReactNode][] {
  const bad = badText(stats);
  return [...statFacts(stats), ["NaN, Inf", badCount(stats) ? <strong key="n" className="source bad">{bad}</strong> : bad]];
}
