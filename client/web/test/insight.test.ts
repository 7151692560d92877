import { describe, expect, it } from "vitest";

import type { RankActivity } from "../src/api/schema";
import { loggedOf } from "../src/views/logged";
import { detailsOf } from "../src/views/mesh_why";

const RANK: RankActivity = {
  rank: 2, error: "", step: 7, phase: "STALLED", phase_reason: "", boundary_age_s: 42, overdue: true,
  activity: "dataloader", doing: "in DataLoader.next", where: "data.py:3 in read", seen_for_s: 40,
  source: "trainer", missing: "",
  threads: [
    { name: "MainThread", native_id: 1, training: true, frames: [{ file: "/a/data.py", line: 3, function: "read" }] },
    { name: "other", native_id: 2, training: false, frames: [{ file: "/a/b.py", line: 1, function: "wait" }] },
  ],
  collectives: [
    { name: "gloo:all_reduce", group: "default_pg", sequence: 9, done: false, age_s: 41 },
    { name: "gloo:barrier", group: "default_pg", sequence: 8, done: true, age_s: 50 },
  ],
  collectives_missing: "", process_state: "S", rss_bytes: 1, peak_rss_bytes: 1, device_bytes: null,
  thread_count: 3, open_file_count: 9, open_file_limit: 1024, host_available_bytes: 1,
  log_lines: ["<b>step 7</b>"], log_missing: "",
};

describe("why", () => {
  it("shows the training's stack, open collectives and the output as text", () => {
    const text = detailsOf(RANK);
    expect(text).toContain("/a/data.py:3 in read");
    expect(text).not.toContain("b.py");
    expect(text).toContain("gloo:all_reduce #9 of default_pg");
    expect(text).not.toContain("barrier");
    expect(text).toContain("| <b>step 7</b>");
  });

  it("says why there are no stacks", () => {
    expect(detailsOf({ ...RANK, threads: [], missing: "the process is stopped" })).toContain("no stacks: the process is stopped");
  });
});

describe("logged numbers", () => {
  it("are the series with their prefix, by metric", () => {
    const series = [
      { metric: "log:loss", subject: "0" },
      { metric: "norm", subject: "w" },
      { metric: "log:loss", subject: "3" },
      { metric: "log:lr", subject: "0" },
    ];
    expect([...loggedOf(series)]).toEqual([["log:loss", ["0", "3"]], ["log:lr", ["0"]]]);
  });
});
