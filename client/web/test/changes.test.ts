import { describe, expect, it } from "vitest";

import type { Spectrum, UpdateRow } from "../src/api/schema";
import { inOrder, shading } from "../src/views/measures";
import { MEASURES } from "../src/views/param_changes";
import { factsOf } from "../src/views/param_spectrum";

const row = (name: string, ratio: number | null): UpdateRow => ({
  name, step: 7, norm: 1, rms: 1, max_abs: 1, weight_norm: 1, ratio, changed: 1, numel: 2, nonfinite: 0,
  moment_rms: null, effective_lr: null,
});
const ROWS = [row("b", 1e-3), row("a", null), row("c", 1e-1), row("d", 1e-3)];

describe("changes", () => {
  it("are sorted by any column, those without a number last", () => {
    expect(inOrder(ROWS, "-ratio", MEASURES).map((one) => one.name)).toEqual(["c", "b", "d", "a"]);
    expect(inOrder(ROWS, "ratio", MEASURES).map((one) => one.name)).toEqual(["b", "d", "c", "a"]);
    expect(inOrder(ROWS, "name", MEASURES).map((one) => one.name)).toEqual(["a", "b", "c", "d"]);
  });

  it("shade what is far from the median", () => {
    const shade = shading(ROWS, MEASURES.find((one) => one.key === "ratio")!, false);
    expect(shade(ROWS[1]!)).toBeNull();
    expect(shade(ROWS[0]!)).toEqual([247, 247, 247]);
    expect(shade(ROWS[2]!)).toEqual([178, 24, 43]);
  });
});

describe("spectrum", () => {
  it("tells a bound from an exact condition number, and lists what is dead", () => {
    const found: Spectrum = {
      name: "w", job: "j", incarnation: 1, step: 3, shape: [9, 5], dtype: "float32", singular_values: [2, 1],
      error: 0, norm: 3, unsettled: false, stable_rank: 2.25, condition: 40, condition_exact: false, dead_rows: [4], dead_row_count: 1,
      dead_columns: [], dead_column_count: 0, duplicate_rows: [[1, 7]], duplicate_row_count: 1, saturated: 0,
      denormal: 0, zero: 0.2, nonfinite: 0,
    };
    const facts = new Map(factsOf(found));
    expect(facts.get("condition number")).toBe("at least 40");
    expect(facts.get("dead rows")).toBe("1: 4");
    expect(facts.get("equal rows")).toBe("1: 1 = 7");
    expect(new Map(factsOf({ ...found, condition: null, condition_exact: true })).get("condition number")).toBe("infinite");
  });
});
