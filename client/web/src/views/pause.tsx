/** Pause, step and resume training; a pause ends with its lease. */

import { type ReactNode, useState } from "react";

import { del, get, post } from "../api/client";
import type { PauseState } from "../api/schema";
import { leaseLeft } from "../lib/edits";
import { count, holderText, plural } from "../lib/format";
import { Badge, Trouble } from "../ui/bits";
import { useHas, useMay, useShared, useWhyNot, whyDead } from "../ui/context";
import { useSending } from "../ui/form";
import { Menu } from "../ui/menu";
import { useNow, usePoll, useQuery } from "../ui/hooks";
import { Checkpoint, RestorePoint } from "./keep";

/** The pause of this token. */
const MINE = "";
const LEASES = ["30", "60", "120", "300"] as const;

export function Pause(): ReactNode {
  const { job, live, summary } = useShared();
  const hasEdit = useHas("edit");
  const whyNot = useWhyNot("edit");
  const mayEdit = whyNot === "";
  const mayExport = useMay("export");
  const now = useNow();
  const [lease, setLease] = useQuery("lease", "30");
  const [steps, setSteps] = useState("1");
  const [keeping, setKeeping] = useState<"" | "checkpoint" | "point">("");
  const pause = usePoll(
    summary && summary.state !== "ended" ? `${job} pause` : null,
    (signal) => get("/api/v1/jobs/{job}/pause", { path: { job }, signal }),
    // Its beginning and end are events; how far it has stepped is not.
    summary?.pause === "running" ? 30_000 : 3000,
    (live.changes["pause"] ?? 0) + (summary?.pause === "running" ? 0 : 1),
  );
  const path = { job };
  const body = { id: "", lease_s: Number(lease), holder: MINE };
  const { busy, problem, send } = useSending();
  const act = (sent: Promise<PauseState>): void => send(sent.finally(pause.refresh));
  const found = pause.data;
  if (!summary || summary.state === "ended") return null;
  const dead = whyDead(summary);
  const paused = found !== null && found.state !== "running" && !dead;
  const left = leaseLeft(found?.lease_left_s, pause.at, now);
  return (
    <section className={`training${paused || dead ? " wide" : ""}`} aria-label="Training">
      {pause.error && <Trouble>{pause.error}</Trouble>}
      {problem && <Trouble>{problem}</Trouble>}
      {keeping === "checkpoint" && <Checkpoint onClose={() => setKeeping("")} />}
      {keeping === "point" && <RestorePoint onClose={() => setKeeping("")} />}
      {found && (
        <div className="pause">
          {paused && <Badge state={found.state} />}
          {paused && (
            <span>
              Paused by {holderText(found.holder) || "an unknown holder"} at step {count(found.step)}
              {found.steps_left > 0 ? `, ${plural(found.steps_left, "step")} to go` : ""}
              {/* No lease runs before the ranks are paused. */}
              {found.lease_left_s > 0 && (
                <>
                  ; resumes in{" "}
                  <strong data-testid="lease" className={left < 10 ? "source bad" : ""}>
                    {Math.ceil(left)} s
                  </strong>
                </>
              )}
            </span>
          )}
          {dead && <span className="faint wrap">{dead}</span>}
          {(mayExport || hasEdit) && (
            <Menu label="Actions">
              {mayExport && (
                <button type="button" onClick={() => setKeeping("checkpoint")}>
                  Checkpoint …
                </button>
              )}
              {hasEdit && (
                <button type="button" disabled={!mayEdit} title={whyNot} onClick={() => setKeeping("point")}>
                  Restore point …
                </button>
              )}
            </Menu>
          )}
          {hasEdit && (
            <div className="actions">
              {paused ? (
                <button type="button" disabled={busy} onClick={() => act(post("/api/v1/jobs/{job}/pause/renew", { path, body }))}>
                  Renew
                </button>
              ) : (
                <button type="button" disabled={busy || !mayEdit} title={whyNot} onClick={() => act(post("/api/v1/jobs/{job}/pause", { path, body }))}>
                  Pause
                </button>
              )}
              <label className="tick">
                for
                <select aria-label="Lease" value={lease} onChange={(event) => setLease(event.target.value)}>
                  {LEASES.map((each) => (
                    <option key={each} value={each}>
                      {each} s
                    </option>
                  ))}
                </select>
              </label>
              {paused && (
                <>
                  <input type="number" min={1} max={1000} aria-label="Steps" value={steps} onChange={(event) => setSteps(event.target.value)} />
                  <button type="button" disabled={busy || !(Number(steps) >= 1)} onClick={() => act(post("/api/v1/jobs/{job}/pause/step", { path, body: { steps: Number(steps), holder: MINE } }))}>
                    Step
                  </button>
                  <button type="button" className="main" disabled={busy} onClick={() => act(del("/api/v1/jobs/{job}/pause", { path }))}>
                    Resume
                  </button>
                </>
              )}
            </div>
          )}
        </div>
      )}
    </section>
  );
}
