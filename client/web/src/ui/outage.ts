/** Whether the control plane refuses connections: known from the first question that fails, told once. */

import { useSyncExternalStore } from "react";

import { onReach } from "../api/client";

let problem = "";
const listeners = new Set<() => void>();

onReach((told) => {
  if (told === problem) return;
  problem = told;
  for (const listener of listeners) listener();
});

function follow(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Why it cannot be reached; empty: it answered last. */
export function useOutage(): string {
  return useSyncExternalStore(follow, () => problem);
}
