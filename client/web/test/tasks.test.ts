import { describe, expect, test } from "vitest";

import { defaultKey, loadText } from "../src/lib/checkpoint";
import { clock } from "../src/lib/format";
import { lineText, tracebackOf } from "../src/lib/logs";

describe("the log of a rank that failed", () => {
  const of = (rank: number, ...lines: string[]): string[] => lines.map((line) => `[rank${rank}]: ${line}`);
  const begin = "Traceback (most recent call last):";
  const frame = '  File "train.py", line 7, in <module>';

  test("its own traceback is taken, not the one that it caused in another rank", () => {
    const log = ["step 1", ...of(1, begin, frame, "ValueError: mine"), ...of(0, begin, frame, "RuntimeError: peer closed"), "E0001 torchrun failed"];
    expect(tracebackOf(log, 1)).toEqual({ rank: 1, lines: [begin, frame, "ValueError: mine"] });
    expect(tracebackOf(log, 0)?.lines.at(-1)).toBe("RuntimeError: peer closed");
    expect(tracebackOf(log, 3)?.rank).toBe(1);
  });

  test("it is whole: with the one that led to it, and a message of several lines", () => {
    const log = ["before", begin, frame, "KeyError: 'x'", "", "During handling of the above exception, another exception occurred:", "", begin, frame, "ValueError: two", "  lines", "after"];
    expect(tracebackOf(log, 0)).toEqual({ rank: -1, lines: log.slice(1, 11) });
  });

  test("a log without one has none", () => {
    expect(tracebackOf(["step 1", "step 2"], 0)).toBeNull();
    expect(tracebackOf([], 0)).toBeNull();
  });

  test("a line of JSON is its time and its event", () => {
    const line = '{"time": 1795920838.7, "event": "attached", "level": "info", "rank": 1, "reason": ""}';
    expect(lineText(line)).toBe(`${clock(1795920838.7)} attached rank=1`);
    expect(lineText("{not json")).toBe("{not json");
    expect(lineText('{"loss": 0.5}')).toBe('{"loss": 0.5}');
  });
});

describe("checkpoints", () => {
  test("a checkpoint is called by its own step", () => {
    expect(defaultKey("a", [{ job: "a" }])).toBe("step-{step}");
    expect(defaultKey("a", [{ job: "a" }, { job: "b" }])).toBe("a/step-{step}");
  });

  test("a path is quoted as a string, whatever it has in it", () => {
    expect(loadText("safetensors", '/a "b" $& c')).toContain('folder = Path("/a \\"b\\" $& c")');
    expect(loadText("peft", "/a")).toContain('from_pretrained(base, "/a")');
    expect(loadText("dcp", "/a")).toContain('dcp.load(state, checkpoint_id="/a")');
  });
});
