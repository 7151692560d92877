/** Two states of the weights compared: this training, its marks and exports, other jobs. */

import { type ReactNode, useMemo, useState } from "react";

import { get } from "../api/client";
import type { DiffDocument, ExportInfo, JobSummary, Mark } from "../api/schema";
import { count, number, percent, plural } from "../lib/format";
import { placeHash } from "../lib/route";
import { Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { Pick } from "../ui/form";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";
import { type Measure, MeasureTable } from "./measures";
import { Change } from "./param_compare";

const PATIENCE_S = 90;
const AHEAD = [1, 10, 100];

export const MEASURES: readonly Measure<DiffDocument>[] = [
  { key: "norm", title: "norm of the difference", of: (row) => row.norm },
  { key: "relative", title: "relative", of: (row) => row.relative },
  { key: "cosine", title: "cosine", of: (row) => row.cosine, text: (row) => number(row.cosine, 7) },
  { key: "max", title: "max", of: (row) => row.max_abs },
  { key: "changed", title: "changed", of: (row) => (row.numel ? row.changed / row.numel : null), text: (row) => row.problem || percent(row.changed, row.numel) },
  { key: "rows", title: "largest rows", of: () => null, text: (row) => row.largest_rows.map((one) => count(one.row)).join(", ") },
];

/** What can be compared, as the API names it, with a text for people. */
export function statesOf(
  marks: readonly Mark[],
  exports: readonly ExportInfo[],
  jobs: readonly JobSummary[],
  job: string,
): [string, string][] {
  return [
    ["now", "now"],
    ...AHEAD.map((n): [string, string] => [`+${n}`, n === 1 ? "the next step" : `${n} steps from now`]),
    // Without a name: an automatic one, which goes by its step.
    ...[...marks].reverse().filter((one) => one.whole).map((one): [string, string] => [`mark:${one.name || one.step}`, one.name ? `restore point ${one.name}, step ${count(one.step)}` : `step ${count(one.step)}, kept until a newer snapshot replaces it`]),
    ...exports
      .filter((one) => one.state === "DONE" && one.format === "safetensors" && !one.removed)
      .map((one): [string, string] => [`export:${one.id}`, `export ${one.destination}, step ${count(one.step ?? 0)}`]),
    ...jobs.filter((one) => one.job !== job).map((one): [string, string] => [`job:${one.job}`, `job ${one.job}, now`]),
  ];
}

export function States(props: { only?: string }): ReactNode {
  const { only = "" } = props;
  const { job, jobs } = useShared();
  const mayRead = useMay("read");
  const mayEdit = useMay("edit");
  const [from, setA] = useQuery(only ? "from" : "a");
  const [to, setB] = useQuery(only ? "to" : "b");
  const [filter] = useQuery("filter");
  const [sort, setSort] = useQuery("diff", "-relative");
  const [one, setOne] = useState("");
  const [asked, setAsked] = useState<{ a: string; b: string; round: number } | null>(null);
  const marks = usePoll(`${job} marks`, (signal) => get("/api/v1/jobs/{job}/marks", { path: { job }, signal }), 0);
  const exports = usePoll(`${job} whole`, (signal) => get("/api/v1/jobs/{job}/exports", { path: { job }, query: { limit: 50 }, signal }), 0);
  const options = useMemo(
    () => statesOf(marks.data?.marks ?? [], exports.data?.exports ?? [], jobs, job),
    [marks.data, exports.data, jobs, job],
  );
  // The past by default, where there is one: the newest restore point or export, else the oldest step that is kept.
  const kept = options.map(([each]) => each).filter((each) => /^(mark|export):/.test(each));
  const past = kept.find((each) => !/^mark:\d+$/.test(each)) ?? kept.at(-1);
  const a = from || (past ?? "now");
  const b = to || (past ? "now" : "+10");
  // The API's own patterns are globs; a filter of the list may say more.
  const text = only ? globOf(only) : filter.trim();
  const globs = text && (only || !/[=<>\s]/.test(text)) ? [text] : undefined;
  const found = usePoll(
    asked ? `${job} ${asked.a} ${asked.b} ${asked.round} ${globs?.[0] ?? ""}` : null,
    (signal) =>
      get("/api/v1/jobs/{job}/diff", {
        path: { job },
        query: { a: asked!.a, b: asked!.b, ...(globs ? { filter: globs } : {}) },
        signal,
        patienceS: PATIENCE_S,
      }),
    0,
  );
  return (
    <Panel
      title={only ? "Compare with what is kept" : "Two states"}
      source={<Source what={`/jobs/${job}/diff`} at={found.at} incarnation={found.data?.incarnation} error={found.error} busy={found.busy} />}
      actions={
        <>
          <Pick label="from" value={a} options={options} onPick={setA} />
          <Pick label="to" value={b} options={options} onPick={setB} />
          <button
            type="button"
            disabled={!mayRead || (found.busy && asked !== null) || a === b}
            onClick={() => {
              setOne(only);
              setAsked({ a, b, round: (asked?.round ?? 0) + 1 });
            }}
          >
            Compare
          </button>
        </>
      }
    >
      {text && !globs && <p className="faint">The filter is more than one pattern of names, so all parameters are compared.</p>}
      {found.error && <Trouble>{found.error}</Trouble>}
      {!found.data && !found.error && (
        <Empty>
          {!mayRead
            ? "Needs a reader's token."
            : found.busy && asked
              ? "Waits for both states and reads them; training goes on."
              : "Choose two states: this training now or some steps ahead, a restore point or a step that is kept, an export in a directory, or another job. Other past steps cannot be read."}
          {mayRead && mayEdit && !past && (
            <>
              {" "}
              <a href={placeHash({ job, view: "edits", query: {} })}>Create a restore point</a> now, to compare with later.
            </>
          )}
        </Empty>
      )}
      {found.data && (
        <>
          <p>
            {found.data.a} → {found.data.b}: {summaryOf(found.data.tensors)}
          </p>
          <MeasureTable label="Two states" rows={found.data.tensors} measures={MEASURES} sort={sort} onSort={setSort} onPick={setOne} leads="a heat map of its difference" />
          {one && asked && <HeatOf key={`${one} ${asked.round}`} name={one} a={asked.a} b={asked.b} />}
        </>
      )}
    </Panel>
  );
}

/** The difference of one tensor, cell by cell; of states that are still there it is read again. */
function HeatOf(props: { name: string; a: string; b: string }): ReactNode {
  const { name, a, b } = props;
  const { job, dark } = useShared();
  const found = usePoll(
    `${job} heat ${name} ${a} ${b}`,
    (signal) =>
      get("/api/v1/jobs/{job}/diff", { path: { job }, query: { a, b, filter: [globOf(name)], heat: true }, signal, patienceS: PATIENCE_S }),
    0,
  );
  const tensor = found.data?.tensors.find((row) => row.name === name);
  const cells = tensor?.cells ?? [];
  const heat = { cell_row_count: cells.length, cell_col_count: cells[0]?.length ?? 0, values: cells.flat() };
  return (
    <section aria-label={`Difference of ${name}`}>
      <h3>
        <Name>{name}</Name> <span className="faint">{found.data ? `${found.data.a} → ${found.data.b}` : ""}</span>
      </h3>
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.busy && <p className="faint">Reads both states again …</p>}
      {tensor?.problem && <Empty>{tensor.problem}</Empty>}
      {heat.values.length > 0 && <Change heat={heat} dark={dark} />}
      <button type="button" onClick={() => patchQuery({ as: "", name, part: "heat" })}>
        Open the parameter
      </button>
    </section>
  );
}

/** A glob that matches this name alone. */
export function globOf(name: string): string {
  return name.replace(/[*?[]/g, "[$&]");
}

/** How many tensors differ, and by how much together. */
export function summaryOf(rows: readonly DiffDocument[]): string {
  const compared = rows.filter((row) => !row.problem);
  const differ = compared.filter((row) => row.changed > 0);
  const norm = Math.hypot(...differ.map((row) => row.norm ?? 0));
  const others = rows.length - compared.length;
  return `${plural(differ.length, "tensor differs", "tensors differ")} (norm ${number(norm, 4)}), ${count(compared.length - differ.length)} are equal${others ? `, ${count(others)} cannot be compared` : ""}.`;
}
