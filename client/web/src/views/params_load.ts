/** Loads the parameter list page by page, and statistics of the visible rows. */

import { useCallback, useEffect, useMemo, useRef, useState } from "react";

import { get } from "../api/client";
import type { MissingDocument, ParamDocument, StatsDocument } from "../api/schema";
import { exactly, filtersFor } from "../lib/filters";

const PAGE = 1000;
/** Up to this many tensors, all statistics come from one request, at one step. */
export const MAX_WHOLE = 1000;
const SETTLE_MS = 250;

export interface Listed {
  key: string;
  filter: string;
  /** As the API orders them; empty: as the model has them. */
  order: string;
  /** Asked for, and nothing is there yet. */
  busy: boolean;
  items: readonly ParamDocument[];
  total: number;
  done: boolean;
  at: number;
  error: string | null;
  digest: string;
  missing: readonly MissingDocument[];
  /** Step of the statistics the filter used; -1: none. */
  step: number;
}

const NOTHING: Listed = {
  key: "",
  filter: "",
  order: "",
  busy: false,
  items: [],
  total: 0,
  done: false,
  at: 0,
  error: null,
  digest: "",
  missing: [],
  step: -1,
};

/** All tensors that the filter selects. The first page is shown at once, others are added. */
export function useParams(job: string, filter: string, order: string, round: number): Listed {
  const [listed, setListed] = useState<Listed>(NOTHING);
  const key = `${job} ${filter} ${order} ${round}`;
  useEffect(() => {
    const controller = new AbortController();
    setListed((old) => ({ ...old, busy: true }));
    void loadAll(job, filter, order, key, controller.signal, setListed);
    return () => controller.abort();
  }, [job, filter, order, key]);
  return listed;
}

async function loadAll(
  job: string,
  filter: string,
  order: string,
  key: string,
  signal: AbortSignal,
  tell: (listed: Listed) => void,
): Promise<void> {
  let items: ParamDocument[] = [];
  let token = "";
  try {
    do {
      const page = await get("/api/v1/jobs/{job}/params", {
        path: { job },
        query: { filter: filter.trim() || "*", limit: PAGE, ...(order ? { sort: order } : {}), ...(token ? { page_token: token } : {}) },
        signal,
      });
      if (signal.aborted) return;
      items = items.concat(page.params);
      token = page.next_page_token;
      tell({
        key,
        filter,
        order,
        busy: false,
        items,
        total: page.total_count,
        done: token === "",
        at: Date.now(),
        error: null,
        digest: page.layout_digest,
        missing: page.missing,
        step: page.step,
      });
    } while (token);
  } catch (error) {
    if (signal.aborted) return;
    tell({ ...NOTHING, key, filter, order, items, error: error instanceof Error ? error.message : String(error) });
  }
}

export interface Numbers {
  of: ReadonlyMap<string, StatsDocument>;
  /** Lowest and highest step among them. */
  steps: [number, number];
  incarnation: number;
  at: number;
  error: string | null;
  busy: boolean;
  refresh: () => void;
  sight: (names: readonly string[]) => void;
}

interface Kept {
  of: Map<string, StatsDocument>;
  steps: [number, number];
  incarnation: number;
  at: number;
  error: string | null;
}

const fresh = (): Kept => ({ of: new Map(), steps: [-1, -1], incarnation: -1, at: 0, error: null });

/** Statistics of the listed tensors: of all if they are few, else of the visible ones. */
export function useNumbers(job: string, filter: string, listed: Listed): Numbers {
  const [kept, setKept] = useState<Kept>(fresh);
  const [busy, setBusy] = useState(false);
  const [round, setRound] = useState(0);
  const [settled, setSettled] = useState<readonly string[]>([]);
  const timer = useRef(0);
  // Debounced: a state updated on every frame would render the whole view each time.
  const sight = useCallback((names: readonly string[]) => {
    window.clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setSettled(names), SETTLE_MS);
  }, []);
  useEffect(() => () => window.clearTimeout(timer.current), []);
  const have = useRef<Map<string, StatsDocument>>(new Map());
  const whole = listed.done && listed.total <= MAX_WHOLE && listed.total > 0;
  const large = listed.total > MAX_WHOLE;
  useEffect(() => {
    have.current = new Map();
    setKept(fresh());
  }, [listed.key, round]);
  const ask = useCallback(
    async (filters: readonly string[], signal: AbortSignal): Promise<void> => {
      setBusy(true);
      try {
        for (const one of filters) {
          const answer = await get("/api/v1/jobs/{job}/params/stats", {
            path: { job },
            query: { filter: one },
            signal,
          });
          for (const row of answer.stats) have.current.set(row.name, row);
          const { step, incarnation } = answer;
          setKept((old) => ({
            of: new Map(have.current),
            steps: old.steps[0] < 0 ? [step, step] : [Math.min(old.steps[0], step), Math.max(old.steps[1], step)],
            incarnation,
            at: Date.now(),
            error: null,
          }));
        }
      } catch (error) {
        if (!signal.aborted) setKept((old) => ({ ...old, error: error instanceof Error ? error.message : String(error) }));
      } finally {
        setBusy(false);
      }
    },
    [job],
  );
  useEffect(() => {
    if (!whole) return;
    const controller = new AbortController();
    void ask([filter.trim() || "*"], controller.signal);
    return () => controller.abort();
  }, [whole, filter, ask, listed.key, round]);
  useEffect(() => {
    if (!large || settled.length === 0) return;
    const wanted = settled.filter((name) => !have.current.has(name) && exactly(name) !== null);
    if (wanted.length === 0) return;
    const controller = new AbortController();
    void ask(filtersFor(wanted).map((words) => words.join(" ")), controller.signal);
    return () => controller.abort();
  }, [large, settled, ask, round]);
  const refresh = useCallback(() => setRound((n) => n + 1), []);
  return useMemo(
    () => ({ ...kept, busy, refresh, sight }),
    [kept, busy, refresh, sight],
  );
}
