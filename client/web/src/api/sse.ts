/** Server-sent events over fetch: EventSource cannot send the session's key. */

import { ApiError, stream } from "./client";

export interface ServerEvent {
  id: string;
  kind: string;
  data: string;
}

/** Incremental parser: `push` returns the events that a chunk completes. */
export class EventParser {
  private rest = "";
  private fields: { id: string; kind: string; data: string[] } = { id: "", kind: "", data: [] };

  push(chunk: string): ServerEvent[] {
    const found: ServerEvent[] = [];
    this.rest += chunk;
    for (;;) {
      const at = this.rest.search(/\r\n|\n|\r/);
      // A trailing \r may be the first half of \r\n.
      if (at < 0 || (this.rest[at] === "\r" && at === this.rest.length - 1)) break;
      const line = this.rest.slice(0, at);
      this.rest = this.rest.slice(this.rest.startsWith("\r\n", at) ? at + 2 : at + 1);
      const event = this.line(line);
      if (event) found.push(event);
    }
    return found;
  }

  private line(line: string): ServerEvent | null {
    if (line === "") {
      const { id, kind, data } = this.fields;
      this.fields = { id, kind: "", data: [] };
      return data.length ? { id, kind: kind || "message", data: data.join("\n") } : null;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return null;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.fields.data.push(value);
    else if (name === "event") this.fields.kind = value;
    else if (name === "id") this.fields.id = value;
    return null;
  }
}

export interface Following {
  onEvent: (event: ServerEvent) => void;
  /** null: connected; else why not. */
  onState: (problem: string | null) => void;
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;

/** Follow a stream until the signal aborts; reconnect with backoff and resume after the last event. */
export async function follow(url: string, to: Following, signal: AbortSignal): Promise<void> {
  let lastId = "";
  let pauseMs = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      const answer = await stream(url, lastId ? { "last-event-id": lastId } : {}, signal);
      to.onState(null);
      pauseMs = FIRST_PAUSE_MS;
      const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new EventParser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        for (const event of parser.push(value)) {
          lastId = event.id || lastId;
          to.onEvent(event);
        }
      }
      to.onState("the stream ended");
    } catch (error) {
      if (signal.aborted) return;
      to.onState(error instanceof Error ? error.message : String(error));
      if (error instanceof ApiError && error.isFinal) return;
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS);
  }
}
