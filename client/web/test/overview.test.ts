import { describe, expect, it } from "vitest";

import type { Alert, Edit, IncarnationRecord, JobSummary, Mark } from "../src/api/schema";
import { causesOf, WINDOW_S } from "../src/lib/causes";
import { csvOf, withGaps, zoomed } from "../src/lib/chart";
import { count } from "../src/lib/format";
import { healthOf, type Known, STALE_MS } from "../src/lib/health";
import { meanOf, parseRun } from "../src/lib/runs";
import { indexTicks, roundStep, valueTicks } from "../src/lib/ticks";
import { drawnOf, editText, type Happening, linesOf, sizeOf, timelineOf } from "../src/lib/timeline";

const JOB: JobSummary = {
  job: "run", incarnation: 1, world_size: 2, joined_count: 2, alive_count: 2, step: 9, state: "ok", reason: "", pause: "running",
  critical_count: 0, warning_count: 0, health: "ok", why: "", cause: "",
  verdict: { level: "ok", word: "ok", line: "every rank reports", cause: "", more: [], ranks: [], names: [], step: -1, watches: [] },
};
const said = (level: string, word: string): Partial<JobSummary> => ({ verdict: { ...JOB.verdict, level, word } });
const WELL: Known = { summary: JOB, silentMs: 1000, problem: null };
const of = (known: Partial<Known>, job: Partial<JobSummary> = {}): string => {
  const found = healthOf({ ...WELL, summary: { ...JOB, ...job }, ...known });
  return `${found.tone} ${found.word}`;
};

describe("health", () => {
  it("is green only when all was looked at and is well", () => {
    expect(of({})).toBe("ok ok");
    expect(of({}, said("info", "running"))).toBe("info running");
  });

  it.each([
    [{}, said("critical", "critical"), "bad critical"],
    [{}, said("warning", "warning"), "warn warning"],
    [{}, said("warning", "paused"), "warn paused"],
    [{}, said("of a newer server", "new"), "warn new"],
    [{}, said("ended", "ended"), "mute ended"],
    [{ silentMs: STALE_MS + 1 }, {}, "bad unknown"],
    [{ problem: "it does not answer" }, {}, "bad unknown"],
  ])("of %j and %j is %s", (known, job, expected) => {
    expect(of(known as Partial<Known>, job)).toBe(expected);
  });

  it("of a job that is not there says so, and before the first answer nothing", () => {
    expect(healthOf({ ...WELL, summary: null }).word).toBe("unknown job");
    expect(healthOf({ ...WELL, summary: null, silentMs: null }).word).toBe("loading");
  });

  it("says the verdict's line, and how old what is shown is", () => {
    expect(healthOf(WELL).why).toBe("every rank reports");
    expect(healthOf({ ...WELL, silentMs: 90_000, problem: "gone" }).why).toContain("1 min 30 s old");
  });
});

const alert = (number: number, rule: string, at: number, more: Partial<Alert> = {}): Alert => ({
  id: `run-1-${number}-abc`, job: "run", incarnation: 1, rule, subject: `w${number}`, severity: rule === "non-finite" ? "critical" : "warning",
  state: "firing", reason: `w${number}`, ranks: [], name: `w${number}`, step: 1, first_seen_s: at, last_seen_s: at, resolved_s: null, suspect: null,
  ...more,
});

describe("causes", () => {
  it("make one of a hundred alerts of a poisoned slice, the first one first", () => {
    const poisoned = Array.from({ length: 51 }, (_, i) => [alert(2 * i + 1, "non-finite", 100 + i), alert(2 * i + 2, "norm-jump", 100 + i)]).flat();
    const found = causesOf([...poisoned].reverse());
    expect(found).toHaveLength(1);
    expect([found[0]!.first.subject, found[0]!.firing]).toEqual(["w1", 102]);
    expect(found[0]!.rules).toEqual([["non-finite", 51], ["norm-jump", 51]]);
  });

  it("keep troubles apart that are of another kind, or of another time", () => {
    const found = causesOf([alert(1, "certificate", 10), alert(2, "non-finite", 12), alert(3, "non-finite", 13 + WINDOW_S + 1)]);
    expect(found.map((one) => one.first.subject)).toEqual(["w2", "w3", "w1"]);
  });

  it("in one round put what is not finite before the jump that it explains", () => {
    expect(causesOf([alert(1, "norm-jump", 5), alert(2, "non-finite", 5)])[0]!.first.rule).toBe("non-finite");
  });

  it("begin with the one that the control plane names", () => {
    const [one, two] = [alert(1, "non-finite", 1), alert(2, "stale-rank", 500)];
    expect(causesOf([one, two], two.id)[0]!.first.id).toBe(two.id);
  });

  it("that are resolved come last", () => {
    const found = causesOf([
      alert(1, "straggler", 1, { state: "resolved", resolved_s: 2 }),
      alert(2, "non-finite", 500),
      alert(3, "non-finite", 501),
    ]);
    expect(found.map((one) => one.firing)).toEqual([2, 0]);
  });
});

const OP = { pattern: "w*", op: "mul", value: 2, weight: null, min: null, max: null, data: false, name_count: 3, numel: 30, names: ["w1"] };
const edit = (id: string, at: number, more: object = {}): Edit =>
  ({ id, incarnation: 1, state: "APPLIED", actor: "ann", note: "", dry_run: false, created_s: at, step: 7, ops: [OP], undo_of: null, undone_by: null, ...more }) as unknown as Edit;
const run = (incarnation: number, began_s: number, ended_s: number | null): IncarnationRecord => ({ incarnation, world_size: 2, began_s, ended_s, reason: "", step: -1 });

describe("the timeline of marks and rollbacks", () => {
  const none = { exports: [], incarnations: [], causes: [], recent: [] };
  const mark = (name: string, made_s: number | null): Mark => ({ name, step: 5, size_bytes: 10, made_s, by: "ann", whole: true, reason: "" });

  it("has the marks that there are, and no standing snapshots", () => {
    const found = timelineOf({ ...none, edits: [], marks: [mark("safe", 12), mark("", null)] });
    expect(found.map((one) => `${one.kind} ${one.what} ${one.step} ${one.who}`)).toEqual(["mark safe 5 ann"]);
  });

  it("says what a rollback goes back to, and what is set", () => {
    const back = edit("a", 20, { ops: [], rollback: { mark: "safe", step: 1500 } });
    const set = edit("b", 21, { ops: [], hyperparameters: { optimizer: 0, group: 1, values: { lr: 0.5, betas: [0.5, 0.75] } } });
    expect(editText(back)).toBe(`rolls back to restore point safe, step ${count(1500)}`);
    expect(editText(set)).toBe("sets lr = 0.5; betas = 0.5, 0.75 in group 1 of optimizer 0");
  });
});

describe("the timeline", () => {
  const sources = { edits: [edit("a", 20), edit("b", 21, { dry_run: true })], marks: [], exports: [], incarnations: [run(1, 10, 30), run(2, 31, null)], causes: causesOf([alert(1, "non-finite", 25)]), recent: [] };

  it("has who changed what, newest first, and no dry runs", () => {
    expect(timelineOf(sources).map((one) => `${one.kind} ${one.state} ${one.who}`)).toEqual([
      "restart began ", "restart ended ", "alert critical ", "edit APPLIED ann", "restart began ",
    ]);
  });

  it("tells an edit of many tensors in one line", () => {
    const many = edit("c", 1, { ops: [OP, { ...OP, pattern: "v" }, { ...OP, op: "fill", value: 0, pattern: "u" }] });
    expect(editText(many)).toBe("mul 2 w* and 1 more, fill 0 u");
    expect(sizeOf(many)).toEqual({ tensors: 9, elements: 90 });
  });
});

describe("charts", () => {
  it("do not bridge a time in which nothing was seen", () => {
    const line = withGaps([[0, 1], [10, 1], [20, 1], [300, 1], [310, 1]]);
    expect(line).toEqual([[0, 1], [10, 1], [20, 1], [30, "-"], [300, 1], [310, 1]]);
    expect(withGaps([[0, 1], [10, 2], [25, 3]])).toHaveLength(3);
    expect(withGaps([])).toEqual([]);
  });

  it("zoom around the middle and stay within", () => {
    expect(zoomed([0, 100], 0.5, 0)).toEqual([25, 75]);
    expect(zoomed([25, 75], 2, 0)).toEqual([0, 100]);
    expect(zoomed([0, 50], 1, -0.5)).toEqual([0, 50]);
    expect(zoomed([0, 50], 1, 0.5)).toEqual([25, 75]);
  });

  it("save rows that no spreadsheet runs", () => {
    expect(csvOf("run", [{ name: '=a"b', data: [[1, 2], [2, "-"]] }], "value")).toBe('job,series,"value","y"\n"run","\'=a""b",1,2\n');
  });
});

describe("ticks", () => {
  it("stand at round indices of what is shown", () => {
    expect(indexTicks(40, 0).map((tick) => tick.label)).toEqual(["0", "10", "20", "30"]);
    expect(indexTicks(8, 4, 4)).toEqual([{ at: 0.0625, label: "4" }, { at: 0.3125, label: "6" }, { at: 0.5625, label: "8" }, { at: 0.8125, label: "10" }]);
    expect(indexTicks(0, 0)).toEqual([]);
    expect([0.3, 1, 3, 70].map(roundStep)).toEqual([0.5, 1, 5, 100]);
  });

  it("of values go from the lowest to the highest", () => {
    expect(valueTicks(-1, 1, 3, String).map((tick) => tick.label)).toEqual(["-1", "0", "1"]);
    expect(valueTicks(2, 2, 3, String)).toEqual([{ at: 0.5, label: "2" }]);
  });
});

describe("runs", () => {
  it("are named in the address, whatever the job is called", () => {
    expect(parseRun("a@b@3")).toEqual({ job: "a@b", incarnation: 3 });
    for (const wrong of ["", "run", "run@", "run@x", "@3", "run@0"]) expect(parseRun(wrong)).toBeNull();
  });

  it("have a mean of what was finite", () => {
    expect(meanOf({ points: [{ step: 1, mean: 2, count: 3 }, { step: 2, mean: null, count: 0 }] })).toBe(2);
    expect(meanOf({ points: [] })).toBeNull();
  });
});

describe("what charts over time mark", () => {
  const one = (kind: Happening["kind"], state: string, time_s: number): Happening => ({
    key: `${kind} ${time_s}`, kind, state, time_s, step: -1, incarnation: 1, who: "", what: "", view: "edits", query: {},
  });

  it("is what changed the training, the newest of it", () => {
    const timeline = [
      one("edit", "APPLIED", 9), one("edit", "ABORTED", 8), one("export", "DONE", 7), one("export", "FAILED", 6),
      one("alert", "critical", 5), one("pause", "paused", 4), one("restart", "began", 3),
    ];
    expect(drawnOf(timeline).map((each) => each.time_s)).toEqual([9, 7, 3]);
    const many = Array.from({ length: 40 }, (_, i) => one("edit", "APPLIED", 100 - i));
    expect(drawnOf(many).map((each) => each.time_s)).toEqual(many.slice(0, 12).map((each) => each.time_s));
  });

  it("names lines that are too close to read apart once", () => {
    const events = [one("edit", "APPLIED", 502), one("export", "DONE", 501), one("edit", "APPLIED", 500), one("pause", "paused", 560), one("edit", "APPLIED", 700)];
    expect(linesOf(events, 400_000, 600_000)).toEqual([
      { name: "edit, export", xAxis: 500_000 }, { name: "", xAxis: 501_000 }, { name: "", xAxis: 502_000 },
      { name: "pause", xAxis: 560_000 },
    ]);
    expect(linesOf([], 0, 1)).toEqual([]);
  });
});
