import { describe, expect, it } from "vitest";

import { ApiError } from "../src/api/client";
import type { ServerEvent } from "../src/api/sse";
import { type Frame, type GradParam, KEPT_NORMS, NO_GRADS, withFrame } from "../src/lib/grads";
import { MAX_RECENT, NOTHING, withEvent, withProblem } from "../src/lib/live";
import type { Alert } from "../src/api/schema";
import { axesOf, coordinates, median, stragglers } from "../src/lib/mesh";
import { type TileData, toneOfRank, wordOf } from "../src/views/mesh_tiles";
import { density, difference, MAX_SAMPLES, type Sample, smooth, spread, withSample } from "../src/lib/samples";
import { rowsOf, treeOf } from "../src/lib/tree";
import { pauseMs, RETRY_MS } from "../src/ui/hooks";

const event = (kind: string, data: object, id = "a-1"): ServerEvent => ({ id, kind, data: JSON.stringify(data) });

describe("the live state", () => {
  it("follows steps, and those of a new incarnation from its own", () => {
    let live = withEvent(NOTHING, event("step", { incarnation: 1, step: 50, time_s: 9 }));
    expect([live.incarnation, live.step, live.time_s]).toEqual([1, 50, 9]);
    live = withEvent(live, event("step", { incarnation: 2, step: 3 }));
    expect([live.incarnation, live.step]).toEqual([2, 3]);
    expect(live.recent).toEqual([]);
  });

  it("counts changes by kind, and after a gap everything may have changed", () => {
    let live = withEvent(NOTHING, event("alert", { rule: "non-finite" }));
    expect(live.changes).toEqual({ alert: 1 });
    live = withEvent(live, event("gap", { missed: 7 }));
    expect(live.changes["alert"]).toBe(2);
    expect(live.changes["edit"]).toBe(1);
  });

  it("keeps the newest events first, and not more than so many", () => {
    let live = NOTHING;
    for (let i = 0; i < MAX_RECENT + 5; i += 1) live = withEvent(live, event("rank", { rank: i }, `a-${i}`));
    expect(live.recent).toHaveLength(MAX_RECENT);
    expect(live.recent[0]!.id).toBe(`a-${MAX_RECENT + 4}`);
  });

  it("survives data that is no JSON", () => {
    expect(withEvent(NOTHING, { id: "", kind: "rank", data: "{" }).recent).toHaveLength(1);
    expect(withProblem(NOTHING, "connecting")).toBe(NOTHING);
  });
});

describe("mesh axes", () => {
  const of = (...placements: string[]): { placement: string }[] => placements.map((placement) => ({ placement }));

  it.each([
    [of("Shard(0) over 4"), 4, "shard 4"],
    [of("Replicate over 2, Shard(0) over 4", "Replicate over 2, Shard(0) over 4"), 8, "data 2, shard 4"],
    [of("Shard(0) over 2, Shard(1) over 2", "Shard(0) over 2, Replicate over 2"), 4, "shard 2, tensor 2"],
    [of("StridedShard(0) over 2, Shard(0) over 2", "Shard(0) over 2, Replicate over 2"), 4, "shard 2, tensor 2"],
    [of("FlatShard over 8"), 8, "shard 8"],
    [of("replicated", "replicated"), 3, "data 3"],
    [of("Shard(0) over 2"), 6, "rank 6"],
    [[], 5, "rank 5"],
  ])("come from placements: %j on %i ranks", (params, world, expected) => {
    expect(axesOf(params, world).map((axis) => `${axis.name} ${axis.size}`).join(", ")).toBe(expected);
  });

  it("place every rank once, the last axis first", () => {
    const axes = [{ name: "data" as const, size: 2 }, { name: "shard" as const, size: 3 }];
    const places = Array.from({ length: 6 }, (_, rank) => coordinates(rank, axes).join());
    expect(places).toEqual(["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]);
  });
});

describe("stragglers", () => {
  const alert = (rule: string, ranks: number[], state = "firing") => ({ rule: rule as Alert["rule"], state: state as Alert["state"], ranks });

  it("are the ranks that the control plane's rules call slow now", () => {
    expect([...stragglers([alert("slow-rank", [2]), alert("straggler", [5])], new Set([2, 5]))]).toEqual([2, 5]);
    expect([...stragglers([alert("slow-rank", [0, 1])], new Set([0, 1]))]).toEqual([]);
    expect([...stragglers([alert("slow-rank", [2], "resolved"), alert("stale-rank", [1])], new Set([1, 2]))]).toEqual([]);
    expect([...stragglers([], new Set())]).toEqual([]);
  });

  it("are none that the verdict does not name", () => {
    expect([...stragglers([alert("slow-rank", [2])], new Set())]).toEqual([]);
  });

});

describe("a rank of the mesh", () => {
  const rank = (more: Partial<TileData>): TileData => ({ state: "ok", named: false, old: false, alertCount: 0, late: false, ...more }) as TileData;

  it.each([
    [{}, "ok ok"],
    [{ named: true }, "warn warning"],
    [{ alertCount: 2 }, "ok ok"],
    [{ state: "down", named: true }, "bad down"],
    [{ named: true, old: true }, "mute unknown"],
  ])("with %j is %s: as the verdict on the job has it", (more, expected) => {
    expect(`${toneOfRank(rank(more))} ${wordOf(rank(more))}`).toBe(expected);
  });
});

describe("the median", () => {
  it("of nothing is no number", () => {
    expect(median([])).toBeNaN();
  });
});

describe("the tree", () => {
  const items = ["a.b.w", "a.b.bias", "a.c", "z"].map((name, i) => ({ name, numel: 10 ** i }));

  it("shows all, in the model's order, and counts what is below", () => {
    const rows = rowsOf(treeOf(items), new Set());
    expect(rows.map((row) => `${" ".repeat(row.depth)}${row.label}`)).toEqual(["a", " b", "  w", "  bias", " c", "z"]);
    expect(rows[0]).toMatchObject({ leaves: 3, numel: 111 });
  });

  it("hides what is below a closed branch", () => {
    const rows = rowsOf(treeOf(items), new Set(["a.b"]));
    expect(rows.map((row) => row.label)).toEqual(["a", "b", "c", "z"]);
  });

  it("takes names that JavaScript has words for", () => {
    const odd = ["__proto__.x", "constructor.y", "a..b", "."].map((name) => ({ name, numel: 1 }));
    expect(rowsOf(treeOf(odd), new Set()).filter((row) => row.kind === "leaf")).toHaveLength(4);
  });
});

const sample = (step: number, norm = 1, incarnation = 1): Sample => ({
  incarnation,
  step,
  time_s: step,
  stats: { count: 4, zero_count: 0, nan_count: 0, inf_count: 0, norm, mean: 0, std: 1, min: -1, max: 1 },
  histogram: { incarnation, step, edges: [0, 1, 2], counts: [1, 3], below_count: 0, above_count: 0 },
  heat: null,
});

describe("samples", () => {
  it("are one for each step, in order, of one incarnation", () => {
    let kept: Sample[] = [];
    for (const step of [3, 1, 2, 2]) kept = withSample(kept, sample(step, step === 2 ? 9 : 1));
    expect(kept.map((one) => one.step)).toEqual([1, 2, 3]);
    expect(withSample(kept, sample(1, 1, 2)).map((one) => one.incarnation)).toEqual([2]);
    for (let step = 0; step < MAX_SAMPLES + 9; step += 1) kept = withSample(kept, sample(step));
    expect(kept).toHaveLength(MAX_SAMPLES);
  });

  it("are spread from the first to the last", () => {
    expect(spread([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)).toEqual([1, 5, 9]);
    expect(spread([1, 2], 5)).toEqual([1, 2]);
    expect(spread([1, 2, 3], 1)).toEqual([3]);
  });

  it("are smoothed without a pull to zero, and gaps stay gaps", () => {
    expect(smooth([5, 5, null, 5], 0.9).map((v) => v && Number(v.toFixed(9)))).toEqual([5, 5, null, 5]);
    expect(smooth([1, 2, 3], 0)).toEqual([1, 2, 3]);
  });

  it("have densities that add up to one, and differences only of equal pictures", () => {
    expect(density(sample(1).histogram!)).toEqual([[0.5, 0.25], [1.5, 0.75]]);
    const heat = (values: (number | null)[]) => ({ cell_row_count: 1, cell_col_count: values.length, values });
    expect(difference(heat([1, null, 3]), heat([2, 2, null]))!.values).toEqual([1, null, null]);
    expect(difference(heat([1]), heat([1, 2]))).toBeNull();
  });
});

describe("gradients", () => {
  const param = (name: string, norm: number | null, more: Partial<GradParam> = {}): GradParam => ({
    name, none: null, count: 4, norm, mean: 0, std: 0, min: 0, max: 0, zero_count: 0, nan_count: 0, inf_count: 0, ...more,
  });
  const frame = (step: number, params: GradParam[], incarnation = 1): Frame => ({
    incarnation, step, dropped: 0, clip: { factor: null }, scale: 1, total: { count: 4, norm: 1, mean: 0, std: 0, min: 0, max: 0, zero_count: 0, nan_count: 0, inf_count: 0 }, params,
  });

  it("that are not finite are marked with the first step, also after they are finite again", () => {
    let grads = withFrame(NO_GRADS, frame(1, [param("w", 1)]));
    grads = withFrame(grads, frame(2, [param("w", null, { nan_count: 3, bad_ranks: [1] })]));
    expect(grads.rows.get("w")).toMatchObject({ mark: "non-finite", firstBad: 2, firstBadRanks: [1] });
    grads = withFrame(grads, frame(3, [param("w", null, { nan_count: 3, bad_ranks: [0, 1] })]));
    expect(grads.rows.get("w")).toMatchObject({ firstBad: 2, firstBadRanks: [1] });
    grads = withFrame(NO_GRADS, frame(1, [param("w", 1)]));
    grads = withFrame(grads, frame(2, [param("w", null, { nan_count: 3, bad_ranks: [1] })]));
    grads = withFrame(grads, frame(3, [param("w", 1)]));
    expect(grads.rows.get("w")).toMatchObject({ mark: "", firstBad: 2, norms: [1, null, 1] });
  });

  it("explode beside those before them, and vanish by themselves", () => {
    let grads = NO_GRADS;
    for (let step = 0; step < 6; step += 1) grads = withFrame(grads, frame(step, [param("w", 1), param("v", 1e-12)]));
    expect(grads.rows.get("v")!.mark).toBe("vanishing");
    expect(withFrame(grads, frame(6, [param("w", 10.5)])).rows.get("w")!.mark).toBe("exploding");
    expect(withFrame(grads, frame(6, [param("w", 9.5)])).rows.get("w")!.mark).toBe("");
  });

  it("that are not there are marked so", () => {
    const grads = withFrame(NO_GRADS, frame(1, [{ name: "w", none: "unused" }]));
    expect(grads.rows.get("w")).toMatchObject({ mark: "none", norms: [null], firstBad: null });
  });

  it("begin anew with an incarnation, and keep no more than so many", () => {
    let grads = NO_GRADS;
    for (let step = 0; step < KEPT_NORMS + 5; step += 1) grads = withFrame(grads, frame(step, [param("w", 1)]));
    expect(grads.rows.get("w")!.norms).toHaveLength(KEPT_NORMS);
    grads = withFrame(grads, frame(0, [param("u", 1)], 2));
    expect([...grads.rows.keys()]).toEqual(["u"]);
    expect(grads.frames).toBe(1);
  });
});

describe("polls", () => {
  it("are repeated soon after a failure that may pass", () => {
    expect(pauseMs(60_000, null)).toBe(60_000);
    for (const failure of [new ApiError(0, "unreachable", ""), new ApiError(503, "partial", ""), new TypeError("")]) {
      expect(pauseMs(60_000, failure)).toBe(RETRY_MS);
      expect(pauseMs(1000, failure)).toBe(1000);
    }
  });

  it("keep their pause when asking again is of no use", () => {
    for (const status of [401, 403, 404, 422]) expect(pauseMs(60_000, new ApiError(status, "", ""))).toBe(60_000);
  });
});
