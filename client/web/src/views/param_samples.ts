/** Collects statistics and histograms of one tensor while its page is open. */

import { useCallback, useEffect, useState, useSyncExternalStore } from "react";

import { get } from "../api/client";
import { exactly, literal } from "../lib/filters";
import { type Sample, withSample } from "../lib/samples";
import { useShared } from "../ui/context";

export const EVERY_MS = 5000;
export const BINS = 64;
const KEPT_CELLS = 64;

const store = new Map<string, readonly Sample[]>();
const listeners = new Set<() => void>();
const NONE: readonly Sample[] = [];

function add(key: string, sample: Sample): void {
  store.set(key, withSample(store.get(key) ?? [], sample));
  for (const each of listeners) each();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export interface Collected {
  samples: readonly Sample[];
  at: number;
  error: string | null;
  /** Take a sample now; with its heat map it can be compared cell by cell. */
  keep: (withHeat: boolean) => Promise<void>;
}

/** The samples of a tensor; another every `EVERY_MS` while `on` and the page is visible. */
export function useSamples(name: string, on: boolean): Collected {
  const { job } = useShared();
  const key = `${job} ${name}`;
  const samples = useSyncExternalStore(subscribe, () => store.get(key) ?? NONE);
  const [state, setState] = useState<{ at: number; error: string | null }>({ at: 0, error: null });
  const take = useCallback(
    async (withHeat: boolean, signal?: AbortSignal): Promise<void> => {
      try {
        add(key, await sampleOf(job, name, withHeat, signal));
        setState({ at: Date.now(), error: null });
      } catch (error) {
        if (signal?.aborted) return;
        setState((old) => ({ ...old, error: error instanceof Error ? error.message : String(error) }));
      }
    },
    [job, key, name],
  );
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const run = async (): Promise<void> => {
      if (!document.hidden) await take(false, controller.signal);
      if (on && !controller.signal.aborted) timer = window.setTimeout(() => void run(), EVERY_MS);
    };
    void run();
    return () => {
      controller.abort();
      window.clearTimeout(timer);
    };
  }, [take, on]);
  return { samples, ...state, keep: take };
}

async function sampleOf(job: string, name: string, withHeat: boolean, signal?: AbortSignal): Promise<Sample> {
  const path = { job };
  const filter = exactly(name);
  if (filter === null) throw new Error("no filter can select this tensor: its name contains a quote");
  const stats = await get("/api/v1/jobs/{job}/params/stats", { path, query: { filter, buffers: true }, signal });
  const row = stats.stats[0];
  if (!row) throw new Error(stats.missing[0]?.reason ?? "the job has no such tensor now");
  const histogram =
    row.min === null
      ? null
      : await get("/api/v1/jobs/{job}/params/histogram", { path, query: { name: literal(name), bins: BINS }, signal });
  const heat = withHeat
    ? await get("/api/v1/jobs/{job}/params/heatmap", {
        path,
        query: { name: literal(name), rows: KEPT_CELLS, columns: KEPT_CELLS },
        signal,
      })
    : null;
  return { incarnation: stats.incarnation, step: stats.step, time_s: Date.now() / 1000, stats: row, histogram, heat };
}
