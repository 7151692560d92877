/** REST API calls, typed by its OpenAPI document: a contract violation does not compile. */

import type { paths } from "./schema";

export type Method = "get" | "post" | "delete";

type Operation<P extends keyof paths, M extends Method> = NonNullable<paths[P][M]>;
type Content<R> = R extends { content: { "application/json": infer J } } ? J : undefined;
type Answers<O> = O extends { responses: infer R } ? R : never;
export type Answer<P extends keyof paths, M extends Method> =
  Answers<Operation<P, M>> extends infer R
    ? Content<R[Extract<keyof R, 200 | 201 | 202 | 204>]>
    : never;
type Parameters<O> = O extends { parameters: infer Q } ? Q : never;
type Query<O> = Parameters<O> extends { query?: infer Q } ? NonNullable<Q> : never;
type Path<O> = Parameters<O> extends { path: infer Q } ? Q : Record<string, never>;
type Body<O> = O extends { requestBody: { content: { "application/json": infer J } } } ? J : never;

/** Paths of the document that have this method. */
type With<M extends Method> = {
  [P in keyof paths]: paths[P][M] extends undefined ? never : P;
}[keyof paths];

export interface Options<O> {
  path?: Path<O>;
  query?: Query<O>;
  body?: Body<O>;
  signal?: AbortSignal | undefined;
  /** Seconds to wait for the answer; default 60. */
  patienceS?: number;
}

/** A problem document (RFC 9457), or no response at all (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly kind: string,
    detail: string,
  ) {
    super(detail);
    this.name = "ApiError";
  }

  /** The same request would get the same answer: who asks, or for what, is wrong. */
  get isFinal(): boolean {
    return [401, 403, 404, 422].includes(this.status);
  }
}

/** A control plane that has not answered a question after this is given up on. */
const PATIENCE_S = 60;

const KEY = "paramd.session";
const listeners = new Set<() => void>();

/** Half of a session; the other half is a cookie that no script can read. */
export function sessionKey(): string {
  return localStorage.getItem(KEY) ?? "";
}

export function keepSessionKey(key: string): void {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

export const SILENT = "the control plane does not answer";
const reached = new Set<(problem: string) => void>();

/** Subscribe to whether the control plane can be reached: its problem, or "" when it answers. */
export function onReach(listener: (problem: string) => void): () => void {
  reached.add(listener);
  return () => reached.delete(listener);
}

function tellReach(problem: string): void {
  for (const listener of reached) listener(problem);
}

/** Subscribe to 401 responses, which mean that the session is over. */
export function onSignedOut(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function get<P extends With<"get">>(
  path: P,
  options: Options<Operation<P, "get">> = {},
): Promise<Answer<P, "get">> {
  return call("get", path, options) as Promise<Answer<P, "get">>;
}

export function post<P extends With<"post">>(
  path: P,
  options: Options<Operation<P, "post">> = {},
): Promise<Answer<P, "post">> {
  return call("post", path, options) as Promise<Answer<P, "post">>;
}

export function del<P extends With<"delete">>(
  path: P,
  options: Options<Operation<P, "delete">> = {},
): Promise<Answer<P, "delete">> {
  return call("delete", path, options) as Promise<Answer<P, "delete">>;
}

/** Sign in. The token is sent once, in a header, and never stored. */
export async function signIn(token: string): Promise<Answer<"/api/v1/session", "post">> {
  const answer = await send("post", "/api/v1/session", { authorization: `Bearer ${token}` });
  const session = (await answer.json()) as Answer<"/api/v1/session", "post">;
  keepSessionKey(session.key);
  return session;
}

/** Sign in with a one-time code of `paramd dashboard`, which dies with this request. Over an open session of another
 * token it is refused with status 409, and the code stays good, unless `replace` says that somebody was asked. */
export async function signInWithCode(code: string, replace = false): Promise<Answer<"/api/v1/session", "post">> {
  const answer = await send("post", `/api/v1/session${replace ? "?replace=true" : ""}`, { authorization: `Paramd-Code ${code}` });
  const session = (await answer.json()) as Answer<"/api/v1/session", "post">;
  keepSessionKey(session.key);
  return session;
}

/** A one-time code for a link that signs somebody in with this token, within an hour. */
export async function invitationFor(token: string): Promise<string> {
  const answer = await send("post", "/api/v1/session/codes?ttl_s=3600", { authorization: `Bearer ${token}`, "x-paramd-session": "" });
  return ((await answer.json()) as Answer<"/api/v1/session/codes", "post">).code;
}

/** A file of an export, part by part; `tell` hears which share of it is here. */
export async function exportFile(job: string, destination: string, name: string, tell: (share: number) => void): Promise<Blob> {
  const parts: Blob[] = [];
  let [have, all] = [0, Number.POSITIVE_INFINITY];
  while (have < all) {
    const answer = await send("get", urlOf("/api/v1/jobs/{job}/export-file", { job }, { destination, name, offset_bytes: have }), {});
    all = Number(answer.headers.get("paramd-file-bytes"));
    const part = await answer.blob();
    if (part.size === 0) break;
    parts.push(part);
    have += part.size;
    tell(have / Math.max(1, all));
  }
  return new Blob(parts);
}

/** A response that is not JSON, such as metrics. */
export async function text(path: string, signal?: AbortSignal): Promise<string> {
  return (await send("get", path, {}, undefined, signal)).text();
}

/** A streaming response of server-sent events. */
export function stream(
  path: string,
  headers: Record<string, string>,
  signal: AbortSignal,
): Promise<Response> {
  return send("get", path, { accept: "text/event-stream", ...headers }, undefined, signal);
}

/** The URL path of an operation with its parameters filled in. */
export function urlOf(
  path: string,
  parameters: Record<string, unknown> = {},
  query: Record<string, unknown> = {},
): string {
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) =>
    encodeURIComponent(String(parameters[name])),
  );
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") search.set(name, String(value));
  }
  const shown = search.toString();
  return shown ? `${filled}?${shown}` : filled;
}

async function call(
  method: Method,
  path: string,
  options: { path?: unknown; query?: unknown; body?: unknown; signal?: AbortSignal | undefined; patienceS?: number },
): Promise<unknown> {
  const url = urlOf(
    path,
    options.path as Record<string, unknown>,
    options.query as Record<string, unknown>,
  );
  const patience = AbortSignal.timeout(1000 * (options.patienceS ?? PATIENCE_S));
  const signal = options.signal ? AbortSignal.any([options.signal, patience]) : patience;
  const answer = await send(method, url, {}, options.body, signal);
  if (answer.status === 204) return undefined;
  try {
    return await answer.json();
  } catch (error) {
    // It may fall silent within an answer, too.
    throw unanswered(error);
  }
}

/** What a request or the rest of its answer failed with, in words; an abort stays one. */
function unanswered(error: unknown): unknown {
  if (error instanceof DOMException && error.name === "AbortError") return error;
  // A frozen control plane accepts connections and says nothing.
  if (error instanceof DOMException && error.name === "TimeoutError") {
    return new ApiError(0, "unreachable", "the control plane accepts connections but does not answer");
  }
  return new ApiError(0, "unreachable", SILENT);
}

async function send(
  method: Method,
  url: string,
  headers: Record<string, string>,
  body?: unknown,
  signal?: AbortSignal,
): Promise<Response> {
  const own: Record<string, string> = { "x-paramd-session": sessionKey(), ...headers };
  if (!own["x-paramd-session"]) delete own["x-paramd-session"];
  if (body !== undefined) own["content-type"] = "application/json";
  let answer: Response;
  try {
    answer = await fetch(url, {
      method: method.toUpperCase(),
      headers: own,
      credentials: "same-origin",
      cache: "no-store",
      redirect: "error",
      ...(body !== undefined ? { body: JSON.stringify(body) } : {}),
      ...(signal ? { signal } : {}),
    });
  } catch (error) {
    const told = unanswered(error);
    // One that is late with an answer may be quick with others; one that is not there answers nobody.
    if (told instanceof ApiError && told.message === SILENT) tellReach(SILENT);
    throw told;
  }
  tellReach("");
  if (answer.ok) return answer;
  const problem = await problemOf(answer);
  if (answer.status === 401 && !headers["authorization"]) for (const listener of listeners) listener();
  throw problem;
}

async function problemOf(answer: Response): Promise<ApiError> {
  try {
    const found = (await answer.json()) as { type?: string; detail?: string };
    const kind = String(found.type ?? "").replace("urn:paramd:error:", "");
    return new ApiError(answer.status, kind, String(found.detail ?? answer.statusText));
  } catch {
    return new ApiError(answer.status, "", answer.statusText || `HTTP ${answer.status}`);
  }
}
