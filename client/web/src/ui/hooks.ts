/** Hooks for all views: the URL's place, polling with an age, one shared clock. */

import { useCallback, useEffect, useRef, useState, useSyncExternalStore } from "react";

import { ApiError } from "../api/client";
import { type Place, parsePlace, placeHash } from "../lib/route";

function onHash(listener: () => void): () => void {
  window.addEventListener("hashchange", listener);
  return () => window.removeEventListener("hashchange", listener);
}

let parsed: { hash: string; place: Place } | null = null;

function currentPlace(): Place {
  const hash = window.location.hash;
  if (parsed?.hash !== hash) parsed = { hash, place: parsePlace(hash) };
  return parsed.place;
}

/** The page's current place. */
export function usePlace(): Place {
  return useSyncExternalStore(onHash, currentPlace);
}

/** Navigate to a place; `replace` adds no history entry (typing, zooming). */
export function go(place: Place, options: { replace?: boolean } = {}): void {
  const hash = placeHash(place);
  if (hash === window.location.hash) return;
  if (options.replace) {
    window.history.replaceState(null, "", hash);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    window.location.hash = hash;
  }
}

/** One entry of the view's state in the URL, and its setter. */
export function useQuery(name: string, fallback = ""): [string, (value: string) => void] {
  const place = usePlace();
  const value = place.query[name] ?? fallback;
  const set = useCallback(
    (next: string) => {
      const here = currentPlace();
      const query = { ...here.query, [name]: next === fallback ? "" : next };
      go({ ...here, query }, { replace: true });
    },
    [name, fallback],
  );
  return [value, set];
}

/** Change several entries of the view's state as one history entry. */
export function patchQuery(patch: Record<string, string>, options: { replace?: boolean } = {}): void {
  const here = currentPlace();
  go({ ...here, query: { ...here.query, ...patch } }, options);
}

export interface Polled<T> {
  data: T | null;
  /** Unix time in milliseconds of the last response; 0: none yet. */
  at: number;
  error: string | null;
  busy: boolean;
  refresh: () => void;
}

/** A poll that failed is repeated after this, however long its own pause: the trouble may be over. */
export const RETRY_MS = 5000;

/** Pause before a poll asks again; `error` is what the last request failed with, null if it did not. */
export function pauseMs(everyMs: number, error: unknown): number {
  const final = error === null || (error instanceof ApiError && error.isFinal);
  return final ? everyMs : Math.min(everyMs, RETRY_MS);
}

/**
 * Fetches now, every `everyMs` (0: once) while the page is visible, whenever `key` changes, and
 * again when `changes` does; after a failure sooner (`pauseMs`). Responses for an older key are
 * dropped; what is shown stays until the next response, and after a failure, with its age.
 */
export function usePoll<T>(
  key: string | null,
  ask: (signal: AbortSignal) => Promise<T>,
  everyMs: number,
  changes = 0,
): Polled<T> {
  const [state, setState] = useState<Omit<Polled<T>, "refresh"> & { key: string | null }>({
    key: null,
    data: null,
    at: 0,
    error: null,
    busy: false,
  });
  const [round, setRound] = useState(0);
  const latest = useRef(ask);
  latest.current = ask;
  const nudge = useRef<(() => void) | null>(null);
  useEffect(() => {
    if (key === null) return;
    const controller = new AbortController();
    let timer = 0;
    let running = false;
    let again = false;
    const run = async (): Promise<void> => {
      window.clearTimeout(timer);
      // The request under way goes on: aborted by each change, none would ever be answered.
      again = running;
      if (running) return;
      if (document.hidden && everyMs > 0) return schedule();
      running = true;
      let failure: unknown = null;
      setState((old) => (old.key === key ? { ...old, busy: true } : { key, data: null, at: 0, error: null, busy: true }));
      try {
        const data = await latest.current(controller.signal);
        if (!controller.signal.aborted) setState({ key, data, at: Date.now(), error: null, busy: false });
      } catch (error) {
        if (controller.signal.aborted) return;
        failure = error;
        const text = error instanceof Error ? error.message : String(error);
        setState((old) => ({ ...old, key, error: text, busy: false }));
      }
      running = false;
      if (again && !controller.signal.aborted) void run();
      else schedule(failure);
    };
    const schedule = (failure: unknown = null): void => {
      if (everyMs > 0 && !controller.signal.aborted) timer = window.setTimeout(() => void run(), pauseMs(everyMs, failure));
    };
    const wake = (): void => {
      if (!document.hidden && everyMs > 0) void run();
    };
    void run();
    nudge.current = () => void run();
    document.addEventListener("visibilitychange", wake);
    return () => {
      controller.abort();
      nudge.current = null;
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
    };
  }, [key, everyMs, round]);
  const asked = useRef(changes);
  useEffect(() => {
    if (asked.current !== changes) nudge.current?.();
    asked.current = changes;
  }, [changes]);
  const refresh = useCallback(() => setRound((n) => n + 1), []);
  const mine = state.key === key;
  return {
    data: mine ? state.data : null,
    at: mine ? state.at : 0,
    error: mine ? state.error : null,
    busy: state.busy,
    refresh,
  };
}

const tickers = new Set<() => void>();
let now = Date.now();
let timer = 0;

function onTick(listener: () => void): () => void {
  tickers.add(listener);
  if (tickers.size === 1) {
    now = Date.now();
    timer = window.setInterval(() => {
      now = Date.now();
      for (const each of tickers) each();
    }, 1000);
  }
  return () => {
    tickers.delete(listener);
    if (tickers.size === 0) window.clearInterval(timer);
  };
}

/** Unix time in milliseconds, once a second. */
export function useNow(): number {
  return useSyncExternalStore(onTick, () => now);
}

/** The value, debounced: updated once it has not changed for `ms`. */
export function useSettled<T>(value: T, ms: number): T {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const waiting = window.setTimeout(() => setSettled(value), ms);
    return () => window.clearTimeout(waiting);
  }, [value, ms]);
  return settled;
}

/** Current size of an element in CSS pixels. */
export function useSize<E extends HTMLElement>(): [React.RefObject<E | null>, number, number] {
  const ref = useRef<E>(null);
  const [size, setSize] = useState<[number, number]>([0, 0]);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setSize([element.clientWidth, element.clientHeight]));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, size[0], size[1]];
}
