import { describe, expect, it } from "vitest";

import { agreed, drawn, type Line, linesCsv, stepAt, withGaps } from "../src/lib/chart";
import { editsOf } from "../src/lib/edits";
import { halves, words } from "../src/lib/format";
import { NOTHING } from "../src/lib/live";
import { timelineOf } from "../src/lib/timeline";
import { shownOf, valueOf } from "../src/views/rates";
import { chosenOf } from "../src/views/logged";
import { whyNoMark } from "../src/views/keep";

const line = (name: string, values: (number | null)[], count = 1): Line => ({
  name, points: values.map((value, i) => ({ step: 10 * i, time_s: 100 + i, value, count })),
});

describe("lines of a run", () => {
  it("lie along steps or time, without what no scale can show", () => {
    const points = [...line("a", [1, 0, null, 4]).points, { step: -1, time_s: 104, value: 9 }];
    const values = points.map((point) => point.value);
    expect(drawn(points, values, { by: "step", log: false, weight: 0 })).toEqual([[0, 1], [10, 0], [20, "-"], [30, 4]]);
    expect(drawn(points, values, { by: "time", log: true, weight: 0 })).toEqual([[100_000, 1], [101_000, "-"], [102_000, "-"], [103_000, 4], [104_000, 9]]);
  });

  it("begin anew where steps come again", () => {
    expect(withGaps([[0, 1], [10, 2], [5, 3]])).toEqual([[0, 1], [10, 2], [10, "-"], [5, 3]]);
  });

  it("of ranks that agree are one, and only of those", () => {
    const one = line("rank 0", [1, null, 3]);
    expect(agreed([one, line("rank 1", [1, null, 3.00001])])).toEqual([{ name: "all 2 ranks", points: one.points }]);
    for (const other of [line("rank 1", [1, null, 3.1]), line("rank 1", [1, 2, 3]), line("rank 1", [1, null, 3], 2), line("rank 1", [])]) {
      expect(agreed([one, other])).toHaveLength(2);
    }
    expect(agreed([one])).toEqual([one]);
    const many = Array.from({ length: 40 }, () => 1);
    expect([1.04, 1.06].map((odd) => agreed([line("a", many), line("b", [...many.slice(1), odd])]).length)).toEqual([1, 2]);
  });

  it("are saved with job, step and time", () => {
    expect(linesCsv("a,b", [line("loss", [0.5, null])])).toBe('job,series,step,time,value\n"a,b","loss",0,1970-01-01T00:01:40.000Z,0.5\n"a,b","loss",10,1970-01-01T00:01:41.000Z,\n');
  });

  it("say at which step a moment was", () => {
    expect([99, 100, 101.5, 999].map((time) => stepAt(line("a", [1, 1, 1]).points, time))).toEqual([null, 0, 10, 20]);
  });

  it("are those that the address names, else the first", () => {
    const all = ["loss", "lr", "a", "b", "c"];
    expect(["", "lr~gone", "none", "gone"].map((text) => chosenOf(text, all))).toEqual([all.slice(0, 4), ["lr"], [], all.slice(0, 4)]);
  });
});

describe("words", () => {
  it("of facts have neither braces nor quotes", () => {
    expect(words({ ops: [{ op: "mul", value: 0.5, min: null }], dry_run: false, note: "" })).toBe("ops (op mul, value 0.5), dry run false");
    expect([words(1e-8), words([0.9, 0.999]), words(null)]).toEqual(["1e-8", "0.9, 0.999", "null"]);
  });

  it("of long names keep both ends, and no half of a character", () => {
    expect(halves("model.layers.23.self_attn.q_proj.weight")).toEqual(["model.layers.", "23.self_attn.q_proj.weight"]);
    expect(halves("model.embed_tokens_and_more.weight")).toEqual(["model.embed_tokens_a", "nd_more.weight"]);
    expect(halves("x".repeat(20))).toEqual(["x".repeat(20), ""]);
    expect(halves("\u{1f600}".repeat(30))[1]).toBe("\u{1f600}".repeat(14));
  });
});

describe("a pause", () => {
  it("is one line from its beginning to its end", () => {
    const event = (id: number, state: string) => ({ id: String(id), kind: "pause", time_s: 10 * id, data: { state, holder: "owner-1", step: id, incarnation: 1 } });
    const told = (states: string[]) =>
      timelineOf({ edits: [], marks: [], exports: [], incarnations: [], causes: [], recent: states.map((state, i) => event(i, state)).reverse() }).map((one) => [one.state, one.what, one.step]);
    expect(NOTHING.recent).toEqual([]);
    expect(told(["pausing", "paused", "running", "pausing", "paused"])).toEqual([["paused", "training", 4], ["resumed", "training for 20 s", 2]]);
  });
});

describe("what is set and kept", () => {
  it("shows the learning rate first, and no flags", () => {
    expect(shownOf({ fused: null, eps: 1e-8, betas: [0.9, 0.95], lr: 0.001, amsgrad: false })).toEqual([["lr", "0.001"], ["betas", "0.9, 0.95"], ["eps", "1e-8"]]);
    expect([valueOf("1e-4"), valueOf("0.9, 0.98"), valueOf("x"), valueOf("")]).toEqual([1e-4, [0.9, 0.98], null, null]);
  });

  it("finds the edits of a parameter", () => {
    const edit = (id: string, more: object) => ({ id, state: "APPLIED", dry_run: false, rollback: null, ops: [{ names: ["w"] }], ...more }) as never;
    const all = [edit("a", {}), edit("b", { dry_run: true }), edit("c", { ops: [{ names: ["v"] }] }), edit("d", { ops: [], rollback: { step: 1 } }), edit("e", { state: "FAILED" })];
    expect(editsOf("w", all).map((one) => one.id)).toEqual(["a", "d"]);
  });

  it("offers no restore point where none can be", () => {
    expect([whyNoMark(null), whyNoMark([{} as never])]).toEqual(["", ""]);
    expect(whyNoMark([])).toContain("resume");
  });
});
