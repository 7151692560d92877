/** Exports: start one, follow its progress, history, schedules. */

import { type ReactNode, useState } from "react";

import { del, exportFile, get } from "../api/client";
import type { DestinationDocument, ExportInfo } from "../api/schema";
import { bytes, clock, count, duration } from "../lib/format";
import { loadText } from "../lib/checkpoint";
import { Badge, Bar, Empty, Line, Name, Panel, Snippet, Source, Trouble } from "../ui/bits";
import { useHas, useMay, useShared, useWhyNot, whyDead } from "../ui/context";
import { useSending } from "../ui/form";
import { useNow, usePoll, useQuery } from "../ui/hooks";
import { save } from "../ui/save";
import { ExportForm } from "./export_form";
import { Load, whyNoLoad } from "./load";

const UNDER_WAY = new Set(["PLANNED", "RUNNING", "VERIFYING"]);

export default function Exports(): ReactNode {
  const { job, live, summary } = useShared();
  const whyNot = useWhyNot("export");
  const mayExport = whyNot === "";
  const destinations = usePoll("destinations", (signal) => get("/api/v1/destinations", { signal }), 0);
  const roots = rootsOf(destinations.data?.destinations ?? []);
  const [fast, setFast] = useState(false);
  const [started, setStarted] = useState(0);
  const exports = usePoll(
    `${job} exports`,
    async (signal) => {
      const found = await get("/api/v1/jobs/{job}/exports", { path: { job }, query: { limit: 200 }, signal });
      setFast(found.exports.some((one) => UNDER_WAY.has(one.state)));
      return found;
    },
    fast ? 1000 : 10_000,
    live.changes["export"] ?? 0,
  );
  const onStarted = (): void => {
    setStarted((n) => n + 1);
    exports.refresh();
  };
  return (
    <>
      <div className="head">
        <h1>Exports</h1>
        {whyNot && whyNot !== whyDead(summary) && <span className="faint">{whyNot}</span>}
      </div>
      {mayExport && destinations.error && <Trouble>{destinations.error}</Trouble>}
      {mayExport && <ExportForm destinations={destinations.data?.destinations ?? []} at={destinations.at} onStarted={onStarted} />}
      <List exports={exports.data?.exports ?? []} roots={roots} mayExport={mayExport} onChanged={exports.refresh} source={<Source what={`/jobs/${job}/exports`} at={exports.at} error={exports.error} busy={exports.busy} refresh={exports.refresh} />} error={exports.error} asked={exports.at > 0} />
      <Schedules key={started} mayExport={mayExport} />
    </>
  );
}

type Roots = ReadonlyMap<string, string>;

function rootsOf(destinations: readonly DestinationDocument[]): Roots {
  return new Map(destinations.map((one) => [one.name, one.root]));
}

/** Paths of destinations by name; empty where this role may not see them. */
export function useRoots(): Roots {
  const found = usePoll("destinations", (signal) => get("/api/v1/destinations", { signal }), 0);
  return rootsOf(found.data?.destinations ?? []);
}

function List(props: {
  exports: readonly ExportInfo[];
  roots: Roots;
  mayExport: boolean;
  onChanged: () => void;
  source: ReactNode;
  error: string | null;
  asked: boolean;
}): ReactNode {
  const { exports, mayExport, onChanged, source, error, asked } = props;
  const [filter, setFilter] = useQuery("filter");
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = [...exports]
    .sort((a, b) => b.created_s - a.created_s)
    .filter((one) => words.every((word) => `${one.destination} ${one.state} ${one.format} ${one.actor} ${one.id}`.toLowerCase().includes(word)));
  return (
    <Panel
      title="History"
      source={source}
      actions={<input type="search" data-filter aria-label="Filter exports" placeholder="destination, state, who   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />}
    >
      {error && <Trouble>{error}</Trouble>}
      {asked && shown.length === 0 && <Empty>{filter ? "No export matches the filter." : "No exports yet."}</Empty>}
      <ul className="bare">
        {shown.map((one) => (
          <One key={one.id} one={one} roots={props.roots} mayExport={mayExport} onChanged={onChanged} />
        ))}
      </ul>
    </Panel>
  );
}

function One(props: { one: ExportInfo; roots: Roots; mayExport: boolean; onChanged: () => void }): ReactNode {
  const { one, mayExport, onChanged } = props;
  const { job } = useShared();
  const now = useNow();
  const { problem, send } = useSending();
  const [open, setOpen] = useQuery("export");
  const [loading, setLoading] = useState(false);
  const noEdit = useWhyNot("edit");
  const admin = useMay("administer");
  const whyNot = noEdit || whyNoLoad(one);
  const place = placeOf(one, props.roots);
  const working = UNDER_WAY.has(one.state);
  const took = (one.ended_s ?? now / 1000) - one.created_s;
  const share = one.size_bytes > 0 ? one.written_bytes / one.size_bytes : working ? 0 : 1;
  const cancel = (): void => send(del("/api/v1/jobs/{job}/exports/{export}", { path: { job, export: one.id } }), onChanged);
  return (
    <li className="alert" data-export={one.id}>
      <div className="bar-row">
        <Badge state={one.state} />
        <strong>
          <Name>{one.destination}</Name>
        </strong>
        <span>{one.format}</span>
        <span className="faint">
          {one.step >= 0 ? `step ${count(one.step)} of run ${one.incarnation}${one.unsettled ? " (not settled)" : ""}, ` : ""}
          {clock(one.created_s)}, {duration(Math.max(0, took))}, by {one.actor}
          {one.schedule ? `, schedule ${one.schedule.slice(0, 8)}` : ""}
          {one.removed ? ", removed by its schedule" : ""}
        </span>
        <span className="num">
          {bytes(one.written_bytes)} of {bytes(one.size_bytes)}
        </span>
        <button type="button" className="small" aria-expanded={open === one.id} onClick={() => setOpen(open === one.id ? "" : one.id)}>
          {open === one.id ? "Less" : "Files and code"}
        </button>
        {one.state === "DONE" && !one.removed && (
          <button type="button" className="small" disabled={whyNot !== ""} title={whyNot} onClick={() => setLoading(true)}>
            Load …
          </button>
        )}
        {mayExport && working && (
          <button type="button" onClick={cancel}>
            Cancel
          </button>
        )}
      </div>
      {working && <Bar share={share} label={`${one.destination}: ${Math.round(100 * share)} % written`} />}
      {one.reason && <p className="wrap">{one.reason}</p>}
      {problem && <Trouble>{problem}</Trouble>}
      {one.state === "DONE" && !one.removed && (
        <>
          <p className="faint wrap">
            {bytes(one.size_bytes)} in <code>{place}</code>
            {props.roots.get(nameOf(one)) ? "" : `, a folder of the destination ${nameOf(one)}${admin ? "" : ", whose path admins see"}`}
          </p>
          {open === one.id && (
            <>
              <p className="faint">To load it in a script:</p>
              <Snippet label={`Lines that load ${one.destination}`}>{loadText(one.format, place)}</Snippet>
              {one.format === "safetensors" && (
                <>
                  <p className="faint">To load it into the running training from a shell:</p>
                  <Line>{`paramd restore ${one.destination} --job ${job}`}</Line>
                </>
              )}
            </>
          )}
        </>
      )}
      {loading && <Load one={one} onClose={() => setLoading(false)} />}
      {open === one.id && <Files id={one.id} everyMs={working ? 1000 : 0} done={one.state === "DONE" && !one.removed} destination={one.destination} />}
    </li>
  );
}

const nameOf = (one: ExportInfo): string => one.destination.split("/")[0] ?? "";

/** Where its files are: the path, or the destination's name where this role is not told its path. */
export function placeOf(one: ExportInfo, roots: Roots): string {
  const root = roots.get(nameOf(one))?.replace(/\/$/, "");
  return root ? `${root}/${one.destination.split("/").slice(1).join("/")}` : one.destination;
}


/** A browser holds a download in memory until it is whole. */
const MAX_DOWNLOAD = 2 ** 31;

function Files(props: { id: string; everyMs: number; done: boolean; destination: string }): ReactNode {
  const { id, everyMs, done, destination } = props;
  const { job, summary } = useShared();
  const over = summary?.state === "ended";
  const mayEdit = useHas("edit") && !over;
  const [loading, setLoading] = useState("");
  const { problem, send } = useSending();
  const download = (name: string): void => {
    setLoading(`${name}: 0 %`);
    const loaded = exportFile(job, destination, name, (share) => setLoading(`${name}: ${Math.round(100 * share)} %`));
    send(loaded.finally(() => setLoading("")), (blob) => save(name, blob));
  };
  const found = usePoll(
    `${job} ${id}`,
    (signal) => get("/api/v1/jobs/{job}/exports/{export}", { path: { job, export: id }, signal }),
    everyMs,
  );
  const files = found.data?.files ?? [];
  if (found.error) return <Trouble>{found.error}</Trouble>;
  return (
    <div className="scroll">
      {problem && <Trouble>{problem}</Trouble>}
      {loading && <p className="faint" role="status">{loading}</p>}
      <table className="plain roomy" aria-label="Files">
        <thead>
          <tr>
            <th>file</th>
            <th>rank</th>
            <th className="num">written</th>
            <th className="num">size</th>
            <th>state</th>
            <th>checksum</th>
            {done && mayEdit && <th>do</th>}
          </tr>
        </thead>
        <tbody>
          {files.slice(0, 500).map((file) => (
            <tr key={file.name}>
              <td>
                <Name>{file.name}</Name>
              </td>
              <td>{file.rank < 0 ? "–" : file.rank}</td>
              <td className="num">{bytes(file.written_bytes)}</td>
              <td className="num">{bytes(file.size_bytes)}</td>
              <td>{file.state}</td>
              <td className="mono">{file.checksum.slice(0, 16)}</td>
              {done && mayEdit && (
                <td>
                  <button type="button" className="small" disabled={loading !== "" || file.size_bytes > MAX_DOWNLOAD} title={file.size_bytes > MAX_DOWNLOAD ? "too large for a browser: copy it from the destination" : undefined} onClick={() => download(file.name)}>
                    Download
                  </button>
                </td>
              )}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Schedules(props: { mayExport: boolean }): ReactNode {
  const { job, live } = useShared();
  const { problem, send } = useSending();
  const found = usePoll(
    `${job} schedules`,
    (signal) => get("/api/v1/jobs/{job}/export-schedules", { path: { job }, signal }),
    30_000,
    live.changes["export"] ?? 0,
  );
  const rows = found.data?.schedules ?? [];
  const remove = (id: string): void => send(del("/api/v1/jobs/{job}/export-schedules/{schedule}", { path: { job, schedule: id } }), found.refresh);
  return (
    <Panel title="Schedules" source={<Source what={`/jobs/${job}/export-schedules`} at={found.at} error={found.error} busy={found.busy} refresh={found.refresh} />}>
      {found.error && <Trouble>{found.error}</Trouble>}
      {problem && <Trouble>{problem}</Trouble>}
      {found.data && rows.length === 0 && <Empty>No schedules.</Empty>}
      <ul className="bare">
        {rows.map((one) => (
          <li key={one.id} className="bar-row">
            <Name>{one.destination}</Name>
            <span>
              {`every ${count(one.every_steps)} steps`}
              {one.keep_last ? `, the last ${count(one.keep_last)} are kept` : ""}
              {one.keep_every ? `, and every ${count(one.keep_every)}th` : ""}
              {one.skipped_count ? `, ${count(one.skipped_count)} skipped while another ran` : ""}
            </span>
            {props.mayExport && (
              <button type="button" onClick={() => remove(one.id)}>
                Remove
              </button>
            )}
          </li>
        ))}
      </ul>
    </Panel>
  );
}
