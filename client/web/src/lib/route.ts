/** The page's location: job, view and the view's state, all in the URL's fragment. Pure. */

export const VIEWS = ["overview", "runs", "mesh", "params", "grads", "edits", "exports", "alerts", "system"] as const;
export type View = (typeof VIEWS)[number];

export interface Place {
  job: string;
  view: View;
  /** State of the view; empty values are left out of the URL. */
  query: Readonly<Record<string, string>>;
}

export function parsePlace(hash: string): Place {
  const [path = "", search = ""] = split(hash.replace(/^#\/?/, ""), "?");
  const [job = "", view = ""] = path.split("/").map(decode);
  const query: Record<string, string> = {};
  for (const [name, value] of new URLSearchParams(search)) query[name] = value;
  const known = VIEWS.find((each) => each === view);
  return { job, view: known ?? "overview", query };
}

export function placeHash(place: Place): string {
  const kept = Object.entries(place.query).filter(([, value]) => value !== "");
  const search = new URLSearchParams(kept).toString();
  return `#/${encodeURIComponent(place.job)}/${place.view}${search ? `?${search}` : ""}`;
}

/** The one-time code in a link of `paramd dashboard`, and the fragment without it. */
export function parseSignIn(hash: string): { code: string; rest: string } | null {
  const found = /^#\/sign-in\/([A-Za-z0-9_-]{16,128})(?:\/(.*))?$/.exec(hash);
  return found?.[1] ? { code: found[1], rest: found[2] ? `#/${found[2]}` : "#/" } : null;
}

function split(text: string, mark: string): [string, string] {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
