/** Keyboard shortcuts: / for the filter, ? for help, g and a letter for a view. */

import { type ReactNode, useEffect } from "react";

import { VIEWS, type View } from "../lib/route";
import { Dialog } from "./bits";

export const TITLES: Record<View, string> = {
  overview: "Overview",
  runs: "Jobs & runs",
  mesh: "Mesh",
  params: "Parameters",
  grads: "Gradients",
  edits: "Edits",
  exports: "Exports",
  alerts: "Alerts & audit",
  system: "System",
};

export const LETTERS: Record<View, string> = {
  overview: "o",
  runs: "r",
  mesh: "m",
  params: "p",
  grads: "g",
  edits: "e",
  exports: "x",
  alerts: "a",
  system: "s",
};

const CHORD_MS = 1500;

export function useKeys(to: { go: (view: View) => void; help: () => void; theme: () => void }): void {
  useEffect(() => {
    let chordUntil = 0;
    const onKey = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const target = event.target as HTMLElement;
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
      if (typing) {
        if (event.key === "Escape") {
          // Otherwise the browser clears a search field.
          event.preventDefault();
          target.blur();
        }
        const table = document.querySelector<HTMLElement>("main .rows");
        if (event.key === "ArrowDown" && target.matches("input[data-filter]") && table) {
          event.preventDefault();
          table.focus();
        }
        return;
      }
      if (document.querySelector("dialog[open]")) return;
      if (Date.now() < chordUntil) {
        chordUntil = 0;
        const view = VIEWS.find((each) => LETTERS[each] === event.key);
        if (view) {
          event.preventDefault();
          to.go(view);
        }
        return;
      }
      if (event.key === "g") chordUntil = Date.now() + CHORD_MS;
      else if (event.key === "?") to.help();
      else if (event.key === "t") to.theme();
      else if (event.key === "/") {
        const filter = document.querySelector<HTMLInputElement>("input[data-filter]");
        if (!filter) return;
        event.preventDefault();
        filter.focus();
        filter.select();
      }
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [to]);
}

export function Help(props: { onClose: () => void }): ReactNode {
  return (
    <Dialog title="Keyboard" onClose={props.onClose}>
      <table className="plain">
        <tbody>
          {VIEWS.map((view) => (
            <tr key={view}>
              <td>
                <kbd>g</kbd> <kbd>{LETTERS[view]}</kbd>
              </td>
              <td>{TITLES[view]}</td>
            </tr>
          ))}
          {[
            ["/", "focus this view's filter"],
            ["↓", "from the filter into the table"],
            ["↑ ↓ Home End", "move in the focused table; Enter opens"],
            ["Esc", "leave the filter, close a dialog"],
            ["t", "light or dark theme"],
            ["?", "this help"],
          ].map(([key, what]) => (
            <tr key={key}>
              <td>
                <kbd>{key}</kbd>
              </td>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <h3>Filters</h3>
      <p className="wrap">
        Separate words by spaces. Any glob may match: <code>layers.*.weight head.*</code>. All terms must hold:{" "}
        <code>numel&gt;1M dtype=bfloat16 shape=4096x* kind=buffer placement~Shard rank=3 tied=true trainable=false</code>;
        also on statistics computed on request: <code>norm&gt;10 std&lt;1e-3 nan&gt;0 zero&gt;100</code>.
        <code>paramd params</code> uses the same language.
      </p>
    </Dialog>
  );
}
