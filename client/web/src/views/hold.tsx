/** Pause, step and resume training; a hold ends with its lease. */

import { type ReactNode, useState } from "react";

import { del, get, post } from "../api/client";
import type { Hold as Held } from "../api/schema";
import { leaseLeft } from "../lib/edits";
import { clock, count } from "../lib/format";
import { Badge, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { useNow, usePoll, useQuery } from "../ui/hooks";

/** The hold of this token. */
const MINE = "";
const LEASES = ["30", "60", "120", "300"] as const;

export function Hold(props: { mayEdit: boolean }): ReactNode {
  const { job, live } = useShared();
  const now = useNow();
  const [lease, setLease] = useQuery("lease", "30");
  const [steps, setSteps] = useState("1");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const hold = usePoll(
    `${job} hold`,
    (signal) => get("/api/v1/jobs/{job}/hold", { path: { job }, signal }),
    3000,
    live.changes["hold"] ?? 0,
  );
  const path = { job };
  const body = { lease_s: Number(lease), holder: MINE };
  const act = (sent: Promise<Held>): void => {
    setBusy(true);
    setProblem("");
    sent
      .catch((error: unknown) => setProblem(error instanceof Error ? error.message : String(error)))
      .finally(() => {
        setBusy(false);
        hold.refresh();
      });
  };
  const found = hold.data;
  const held = found !== null && found.state !== "running";
  const left = leaseLeft(found?.lease_left_s, hold.at, now);
  return (
    <Panel
      title="Training"
      source={<Source what={`/jobs/${job}/hold`} at={hold.at} step={found?.step} error={hold.error} busy={hold.busy} />}
    >
      {hold.error && <Trouble>{hold.error}</Trouble>}
      {problem && <Trouble>{problem}</Trouble>}
      {found && (
        <div className="hold">
          <Badge state={found.state} />
          {held && (
            <span>
              by {found.holder || "an unknown holder"}
              {found.since_s ? ` since ${clock(found.since_s)}` : ""}
              {found.steps_left > 0 ? `, ${count(found.steps_left)} steps to go` : ""}
              {/* No lease runs before the ranks are held. */}
              {found.lease_left_s > 0 && (
                <>
                  ; resumes automatically in{" "}
                  <strong data-testid="lease" className={left < 10 ? "source bad" : ""}>
                    {Math.ceil(left)} s
                  </strong>
                </>
              )}
            </span>
          )}
          {props.mayEdit && (
            <div className="actions">
              {held ? (
                <button type="button" disabled={busy} onClick={() => act(post("/api/v1/jobs/{job}/hold/renew", { path, body }))}>
                  Renew
                </button>
              ) : (
                <button type="button" disabled={busy} onClick={() => act(post("/api/v1/jobs/{job}/hold", { path, body }))}>
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
              {held && (
                <>
                  <input type="number" min={1} max={1000} aria-label="Steps" value={steps} onChange={(event) => setSteps(event.target.value)} />
                  <button type="button" disabled={busy || !(Number(steps) >= 1)} onClick={() => act(post("/api/v1/jobs/{job}/hold/step", { path, body: { steps: Number(steps), holder: MINE } }))}>
                    Step
                  </button>
                  <button type="button" className="main" disabled={busy} onClick={() => act(del("/api/v1/jobs/{job}/hold", { path }))}>
                    Resume
                  </button>
                </>
              )}
            </div>
          )}
        </div>
      )}
    </Panel>
  );
}
