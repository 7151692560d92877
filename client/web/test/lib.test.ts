import { describe, expect, it } from "vitest";

import { EventParser } from "../src/api/sse";
import { between, colorer, tint } from "../src/lib/color";
import { bodyOf, discardedOf, EMPTY, leaseLeft, newId, opText } from "../src/lib/edits";
import { exactly, filtersFor, MAX_FILTER_BYTES, parseSlice, sliced, substrings } from "../src/lib/filters";
import { facts } from "../src/lib/stats";
import { nextSort, sortedBy } from "../src/lib/sort";
import { bytes, clock, count, plural, duration, number, percent, shape, short, shortest } from "../src/lib/format";
import { parseMetrics } from "../src/lib/prometheus";
import { parsePlace, parseSignIn, placeHash } from "../src/lib/route";

describe("elements", () => {
  it.each([
    ["0.10000000149011612", "float32", "0.1"],
    ["0.0010000000474974513", "float32", "0.001"],
    ["0.30000001192092896", "float32", "0.3"],
    ["16777217.0", "float64", "16777217"],
    ["0.1", "float64", "0.1"],
    ["9007199254740993", "int64", "9007199254740993"],
    ["nan", "float32", "nan"],
    ["True", "bool", "True"],
  ])("%s of %s are %s in short", (exact, dtype, expected) => {
    expect(shortest(exact, dtype)).toBe(expected);
  });

  it("in short are the same float32 again", () => {
    for (let i = 1; i < 2000; i += 1) {
      const value = Math.fround(Math.sin(i) * 10 ** ((i % 60) - 30));
      expect(Math.fround(Number(shortest(String(value), "float32")))).toBe(value);
    }
  });
});

describe("places", () => {
  it.each([
    { job: "run", view: "params" as const, query: { filter: "layers.*.weight norm>10", name: "a&b=c#?" } },
    { job: "a/b ü", view: "mesh" as const, query: {} },
    { job: "", view: "mesh" as const, query: {} },
  ])("come back from the URL as they went in: %j", (place) => {
    expect(parsePlace(placeHash(place))).toEqual(place);
  });

  it("that cannot be read are the overview", () => {
    expect(parsePlace("#/%E0%A4%A/nowhere?x")).toEqual({ job: "%E0%A4%A", view: "overview", query: { x: "" } });
  });

  it("give the code of a sign-in link once, and what is left without it", () => {
    const code = "AbC_-0123456789abcdef";
    expect(parseSignIn(`#/sign-in/${code}/my-run`)).toEqual({ code, rest: "#/my-run" });
    expect(parseSignIn(`#/sign-in/${code}`)).toEqual({ code, rest: "#/" });
    for (const other of ["", "#/my-run/mesh", "#/sign-in/", "#/sign-in/short"]) expect(parseSignIn(other)).toBeNull();
  });

  it("leave out what is empty", () => {
    expect(placeHash({ job: "j", view: "mesh", query: { a: "", b: "1" } })).toBe("#/j/mesh?b=1");
  });
});

describe("server-sent events", () => {
  it("are the same however the text is cut", () => {
    const text = 'id: a-1\r\nevent: step\r\ndata: {"a":\r\ndata: 1}\r\n\r\n: alive\n\nid: a-2\ndata: x\n\n';
    const whole = new EventParser().push(text);
    expect(whole).toEqual([
      { id: "a-1", kind: "step", data: '{"a":\n1}' },
      { id: "a-2", kind: "message", data: "x" },
    ]);
    for (let size = 1; size < 8; size += 1) {
      const parser = new EventParser();
      const found = [];
      for (let at = 0; at < text.length; at += size) found.push(...parser.push(text.slice(at, at + size)));
      expect(found).toEqual(whole);
    }
  });
});

describe("filters", () => {
  it("name one tensor, whatever it is called", () => {
    expect(exactly("layers.0.weight")).toBe('"layers.0.weight"');
    expect(exactly("a*b[0]?")).toBe('"a[*]b[[]0][?]"');
    expect(exactly('a"b')).toBe('"a""b"');
    expect(exactly("")).toBeNull();
  });

  it("are cut to what one request may hold, and lose no name", () => {
    const names = Array.from({ length: 500 }, (_, i) => `layers.${i}.${"ü".repeat(i % 50)}`);
    const groups = filtersFor(names);
    expect(groups.flat()).toHaveLength(500);
    for (const group of groups) {
      expect(new TextEncoder().encode(group.join(" ")).length).toBeLessThanOrEqual(MAX_FILTER_BYTES);
      expect(group.length).toBeLessThanOrEqual(64);
    }
  });

  it("know slices and write them", () => {
    expect(parseSlice("w[0:4, 8:16]")).toEqual({ name: "w", ranges: [{ begin: 0, end: 4 }, { begin: 8, end: 16 }] });
    expect(parseSlice("w[a:b]")).toEqual({ name: "w[a:b]", ranges: [] });
    expect(sliced("w", [{ begin: 1, end: 2 }])).toBe("w[1:2]");
  });
});

describe("facts of a tensor", () => {
  it("say which elements their numbers leave out", () => {
    const stats = { count: 4000, nan_count: 2912, inf_count: 0, zero_count: 0, norm: 1 };
    expect(facts(stats).at(-1)).toEqual(["left out above", "2,912 NaN or Inf of 4,000"]);
    expect(facts({ ...stats, nan_count: 0 }).map(([title]) => title)).not.toContain("left out above");
  });
});

describe("what is typed", () => {
  it.each([
    ["", "*"],
    [" up ", "name~up"],
    ["layers.3 norm>8", "name~layers.3 norm>8"],
    ["layers.*.weight numel>1M", "layers.*.weight numel>1M"],
    ['"a b"', '"a b"'],
    ["w[0:4, 8:16]", "w[0:4, 8:16]"],
  ])("%j is the filter %j", (typed, filter) => {
    expect(substrings(typed)).toBe(filter);
  });
});

describe("orders", () => {
  it("begin with the largest number and the first name, and have what is not known last", () => {
    expect([nextSort("", "norm"), nextSort("-norm", "norm"), nextSort("norm", "norm")]).toEqual(["-norm", "norm", ""]);
    expect([nextSort("", "name"), nextSort("norm", "name")]).toEqual(["name", "name"]);
    const rows = [null, 2, Number.NaN, 30];
    expect(sortedBy(rows, "-n", (row) => row)).toEqual([30, 2, null, Number.NaN]);
    expect(sortedBy(rows, "n", (row) => row)).toEqual([2, 30, null, Number.NaN]);
  });
});

describe("text of numbers", () => {
  it.each([null, undefined, NaN, Infinity, -Infinity, -0, 2 ** 62, 1e308, -1e308, 5e-324])("tells %s without a word that is none", (value) => {
    const told = [number(value), count(value), bytes(value ?? NaN), duration(value ?? NaN), short(value ?? NaN), percent(value ?? NaN, 10), percent(1, value ?? NaN), clock(value ?? NaN)];
    expect(told.filter((text) => /undefined|null|Invalid|NaN %|\(/.test(text))).toEqual([]);
  });
  it("is short and says its unit", () => {
    expect([number(null), number(0), number(0.00012345), number(1234567), number(1.23456)]).toEqual(["–", "0", "1.23e-4", "1.23e+6", "1.235"]);
    expect([bytes(0), bytes(1536), bytes(3 * 2 ** 30)]).toEqual(["0 B", "1.5 KiB", "3.0 GiB"]);
    expect([duration(0), duration(2e-6), duration(0.25), duration(61), duration(90_000)]).toEqual(["0 s", "2 µs", "250 ms", "1 min 1 s", "1 d 1 h"]);
    expect([count(Number.NaN), count(null), bytes(Number.NaN), bytes(2 ** 62), number(-0), number(1e308)]).toEqual(["–", "–", "–", "4.0 EiB", "0", "1.00e+308"]);
    expect([plural(1, "step"), plural(2, "step"), plural(0, "copy", "copies")]).toEqual(["1 step", "2 steps", "0 copies"]);
    expect([percent(0, 5), percent(1, 3), percent(1, 1e9), percent(0, 0)]).toEqual(["0 %", "33.3 %", "< 0.01 %", "–"]);
    expect([short(999), short(65_536), short(7e9), shape([]), shape([2, 3])]).toEqual(["999", "65.5 k", "7 G", "scalar", "2 × 3"]);
  });
});

describe("edits", () => {
  const draft = { ...EMPTY, pattern: " layers.* ", value: "0.5" };

  it("become requests with all that was said", () => {
    const made = bodyOf({ ...draft, ifStep: "7", note: "why", resetMoments: true }, "i".repeat(32), true);
    expect(made).toEqual({
      body: {
        id: "i".repeat(32),
        ops: [{ pattern: "layers.*", op: "mul", value: 0.5, data: false }],
        wait_s: 30,
        if_step: 7,
        note: "why",
        reset_moments: true,
        allow_nonfinite: false,
        dry_run: true,
      },
    });
    expect(bodyOf({ ...draft, op: "clamp", min: "-1" }, "i", false)).toMatchObject({
      body: { ops: [{ pattern: "layers.*", op: "clamp", min: -1 }], if_step: null, dry_run: false },
    });
  });

  it.each([
    { pattern: "" },
    { value: "" },
    { value: "abc" },
    { value: "NaN" },
    { value: "Infinity" },
    { value: "NaN (all)", allowNonfinite: true },
    { op: "clamp" as const },
    { ifStep: "1.5" },
  ])("that are not whole say what is missing: %j", (patch) => {
    expect(bodyOf({ ...draft, ...patch }, "i", false)).toHaveProperty("problem");
  });

  it.each([["NaN", "nan"], ["+Inf", "inf"], ["-infinity", "-inf"]])("write %s where that is allowed", (value, told) => {
    const made = bodyOf({ ...draft, op: "fill", value, allowNonfinite: true }, "i", false);
    expect(made).toMatchObject({ body: { ops: [{ value: told }] } });
  });

  it("have ids of 32 digits and words", () => {
    expect(newId()).toMatch(/^[0-9a-f]{32}$/);
    expect(opText({ op: "fill", value: "nan" })).toBe("fill nan");
    expect(opText({ op: "lerp", value: 0, weight: 0.1, min: null })).toBe("lerp 0 weight 0.1");
  });

  it("are discarded by a rollback to before them, until that is undone", () => {
    const past = (id: string, step: number, more: object = {}) =>
      ({ id, incarnation: 1, state: "APPLIED" as const, step, created_s: step, undone_by: null, rollback: null, ...more });
    const back = { id: "back", created_s: 500, rollback: { mark: "", step: 190 } };
    const all = [past("early", 150), past("late", 354), past("after", 200, { created_s: 600 }), past("other", 354, { incarnation: 2 })];
    expect([...discardedOf([...all, past("back", 400, back)])]).toEqual(["late"]);
    expect([...discardedOf([...all, past("back", 400, { ...back, undone_by: "x" })])]).toEqual([]);
  });

  it("hold for what is left of the lease", () => {
    expect(leaseLeft(30, 1000, 11_000)).toBe(20);
    expect(leaseLeft(30, 1000, 99_000)).toBe(0);
    expect(leaseLeft(null, 1000, 1000)).toBe(0);
  });
});

describe("metrics", () => {
  it("are read with their labels", () => {
    const text = '# HELP a b\na_total{job="x",rule="say \\"hi\\""} 3.0\nb 1e-3\nnonsense\n';
    expect(parseMetrics(text)).toEqual([
      { name: "a_total", labels: { job: "x", rule: 'say "hi"' }, value: 3 },
      { name: "b", labels: {}, value: 0.001 },
    ]);
  });
});

describe("colours", () => {
  it("covers what is behind a tint, whatever length the theme's colours have", () => {
    expect(tint("#fff", "#000000", 0.2)).toBe("rgb(204, 204, 204)");
    expect(tint("#1a1f1e", "#6cc3c4", 0)).toBe("rgb(26, 31, 30)");
  });
  it("are the ends at the ends, and the middle for zero", () => {
    const scale = [[0, 0, 0], [100, 100, 100]] as const;
    expect([between(scale, -1), between(scale, 0.5), between(scale, 9)]).toEqual([[0, 0, 0], [50, 50, 50], [100, 100, 100]]);
    const color = colorer(-1, 4, { signed: true, dark: false });
    expect(color(0)).toEqual([247, 247, 247]);
    expect(color(4)).toEqual([178, 24, 43]);
  });
});
