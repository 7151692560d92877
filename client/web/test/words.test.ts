/** What the page says of the control plane, of the audit and of lone points. */

import { describe, expect, it } from "vitest";

import type { AuditRecord } from "../src/api/schema";
import { changesOf, resultOf } from "../src/lib/audit";
import { loneOf } from "../src/lib/chart";
import { clock, eventText } from "../src/lib/format";
import { parseMetrics, sentencesOf } from "../src/lib/prometheus";
import { lossOf } from "../src/views/logged";

const record = (seq: number, kind: string, of: number | null = null, result: string | null = null): AuditRecord => ({
  seq, kind, time_ms: 1000 * seq, actor: "ann", role: "admin", method: "edit.create", incarnation: 1, step: -1, detail: { pattern: "w" }, of, result, body: "{}", hash: "",
});

describe("the audit", () => {
  it("has one line for each action, with how it ended", () => {
    const found = changesOf([record(5, "event"), record(4, "intent"), record(3, "outcome", 2, "done"), record(2, "intent"), record(1, "outcome", 0, "failed: no")]);
    expect(found.map((one) => [one.record.seq, resultOf(one)])).toEqual([[5, ""], [4, "no outcome yet"], [2, "done"], [1, "failed: no"]]);
    expect(found[2]!.outcome!.seq).toBe(3);
  });
});

describe("points", () => {
  it("are lone where no line reaches them", () => {
    expect([...loneOf([[0, 1], [1, "-"], [2, 1], [3, 2], [4, "-"], [5, 3]])]).toEqual([0, 5]);
    expect([...loneOf([])]).toEqual([]);
  });
});

describe("what the control plane does", () => {
  it("is said in sentences", () => {
    const text = ['paramd_boundary_rounds_total{job="a",captured="true"} 2', 'paramd_boundary_rounds_total{job="a",captured="false"} 1', 'paramd_exports_total{job="a",state="DONE"} 1', "paramd_audit_ok 0"];
    const found = sentencesOf(parseMetrics(text.join("\n"))).join(" ");
    expect(found).toContain("asked for a common step 3 times, 2 of them with a copy");
    expect(found).toContain("1 export done, 0 running");
    expect(found).toContain("The audit cannot be written");
    expect(found).not.toContain("_");
  });

  it("tells moments as clock times", () => {
    expect(eventText({ job: "a", time_s: 1, first_seen_s: 1795920000, step: 4 })).toBe(`first seen ${clock(1795920000)}, step 4`);
  });
});

describe("the loss", () => {
  it("is found by its name", () => {
    expect(lossOf(new Map([["log:lr", ["0"]], ["log:train/loss", ["1"]]]))).toEqual({ name: "train/loss", metric: "log:train/loss", subject: "1" });
    expect(lossOf(new Map([["log:eval_loss", ["0"]], ["log:loss", ["0"]]]))!.name).toBe("loss");
    expect(lossOf(new Map([["log:lr", ["0"]]]))).toBeNull();
  });
});
