/** A restore point or a checkpoint of now, from wherever one is. */

import { type ReactNode, useState } from "react";

import { get, post } from "../api/client";
import type { Mark } from "../api/schema";
import { count } from "../lib/format";
import { placeHash } from "../lib/route";
import { Dialog, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { go, usePoll } from "../ui/hooks";
import { textOf } from "../ui/problems";

/** Why no restore point can be made now; empty: one can. A training that can keep one has automatic ones. */
export function whyNoMark(marks: readonly Mark[] | null): string {
  if (marks === null || marks.length > 0) return "";
  return 'This training keeps no restore points: they need paramd.attach(..., resume="auto"). If it has that, the first automatic one is made soon.';
}

export function RestorePoint(props: { onClose: () => void }): ReactNode {
  const { job, live } = useShared();
  const [name, setName] = useState(`step-${Math.max(0, live.step)}`);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const [made, setMade] = useState<Mark | null>(null);
  const marks = usePoll(`${job} marks now`, (signal) => get("/api/v1/jobs/{job}/marks", { path: { job }, signal }), 5000);
  const why = whyNoMark(marks.data?.marks ?? null);
  const create = (): void => {
    setBusy(true);
    setProblem("");
    post("/api/v1/jobs/{job}/marks", { path: { job }, body: { name: name.trim() } })
      .then(setMade)
      .catch((error: unknown) => setProblem(textOf(error)))
      .finally(() => setBusy(false));
  };
  return (
    <Dialog title="Create a restore point?" onClose={props.onClose}>
      <p>The complete state of the next step (parameters, optimizer, random states) is kept in memory under a name. Training pauses while it is copied, and can be rolled back to it.</p>
      <label className="field">
        Name
        <input type="text" maxLength={64} value={name} onChange={(event) => setName(event.target.value)} />
      </label>
      {why && <p className="faint">{why}</p>}
      {problem && <Trouble>{problem}</Trouble>}
      {made && <p role="status">Restore point {made.name} is kept, of step {count(made.step)}.</p>}
      <div className="foot">
        <a className="button" href={placeHash({ job, view: "edits", query: {} })} onClick={props.onClose}>
          All restore points
        </a>
        <button type="button" onClick={props.onClose}>
          {made ? "Close" : "Cancel"}
        </button>
        {!made && (
          <button type="button" className="main" title={why} disabled={busy || why !== "" || !name.trim()} onClick={create}>
            Create it
          </button>
        )}
      </div>
    </Dialog>
  );
}

export function Checkpoint(props: { onClose: () => void }): ReactNode {
  const { job, live } = useShared();
  const [name, setName] = useState("");
  const [key, setKey] = useState(`${job}/step-${Math.max(0, live.step)}`);
  const [optimizer, setOptimizer] = useState(false);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const found = usePoll("destinations", (signal) => get("/api/v1/destinations", { signal }), 0);
  const all = found.data?.destinations ?? [];
  const chosen = name || (all[0]?.name ?? "");
  const start = (): void => {
    setBusy(true);
    setProblem("");
    const include: ("parameters" | "buffers" | "optimizer")[] = ["parameters", "buffers", ...(optimizer ? (["optimizer"] as const) : [])];
    const body = { destination: `${chosen}/${key.trim()}`, format: optimizer ? ("dcp" as const) : ("safetensors" as const), include, verify: true, max_shard_size: "5GB", dtype: null, tied: "drop" as const, name_map: {}, patterns: [], timeout_s: 3600, assets: [], replica: 0, overwrite: false };
    post("/api/v1/jobs/{job}/exports", { path: { job }, body })
      .then((made) => {
        props.onClose();
        go({ job, view: "exports", query: { export: made.id } });
      })
      .catch((error: unknown) => {
        setProblem(textOf(error));
        setBusy(false);
      });
  };
  return (
    <Dialog title="Write a checkpoint now?" onClose={props.onClose}>
      <p>Of the next step, while training goes on; its files are checked after they are written.</p>
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.data && all.length === 0 && (
        <p className="faint">
          No destination is configured: set <code>[destinations]</code> in <code>paramd.toml</code>, or PARAMD_DESTINATIONS.
        </p>
      )}
      <div className="form">
        <label className="field">
          Destination
          <select value={chosen} onChange={(event) => setName(event.target.value)}>
            {all.map((one) => (
              <option key={one.name} value={one.name}>
                {one.name} ({one.kind})
              </option>
            ))}
          </select>
        </label>
        <label className="field">
          Folder name
          <input type="text" className="mono" spellCheck={false} value={key} onChange={(event) => setKey(event.target.value)} />
        </label>
        <label className="tick">
          <input type="checkbox" checked={optimizer} onChange={(event) => setOptimizer(event.target.checked)} />
          with the optimizer's state (as DCP)
        </label>
      </div>
      {problem && <Trouble>{problem}</Trouble>}
      <div className="foot">
        <a className="button" href={placeHash({ job, view: "exports", query: {} })} onClick={props.onClose}>
          More choices
        </a>
        <button type="button" onClick={props.onClose}>
          Cancel
        </button>
        <button type="button" className="main" disabled={busy || !chosen || !key.trim()} onClick={start}>
          Write it
        </button>
      </div>
    </Dialog>
  );
}
