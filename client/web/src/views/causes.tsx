/** Alerts with one cause as one item, with acknowledging and silencing. */

import { type ReactNode, useState } from "react";

import { post } from "../api/client";
import type { AlertDocument, SilenceRequest } from "../api/schema";
import type { Cause } from "../lib/causes";
import { clock, count, duration } from "../lib/format";
import { placeHash } from "../lib/route";
import { Badge, Dialog, Name, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { useNow } from "../ui/hooks";
import { textOf } from "../ui/problems";

const MEMBERS_SHOWN = 100;

export function CauseItem(props: { cause: Cause; open?: boolean; onChanged: () => void; children?: ReactNode }): ReactNode {
  const { cause, onChanged, children } = props;
  const { first } = cause;
  const mayEdit = useMay("edit");
  const now = useNow();
  const [open, setOpen] = useState(props.open ?? false);
  const [asking, setAsking] = useState(false);
  const ended = cause.firing ? now / 1000 : Math.max(...cause.alerts.map((alert) => alert.resolved_s ?? 0));
  const seen = cause.alerts.find((alert) => alert.acknowledged_by);
  return (
    <li className="alert" data-rule={first.rule} data-cause={cause.id}>
      <div className="bar-row">
        <Badge state={cause.firing ? (cause.critical ? "critical" : "warning") : "resolved"} />
        <strong>{cause.rules.map(([rule, n]) => (n > 1 ? `${rule} × ${count(n)}` : rule)).join(", ")}</strong>
        <span className="faint">
          {cause.firing ? "since" : "from"} {clock(first.first_seen_s)}, {duration(Math.max(0, Math.round(ended - first.first_seen_s)))}
        </span>
        <Where alert={first} />
        {cause.firing > 0 && cause.open === 0 && <Badge state={seen ? `seen by ${seen.acknowledged_by}` : "silenced"} tone="mute" />}
        {mayEdit && cause.open > 0 && (
          <button type="button" className="small" onClick={() => setAsking(true)}>
            Acknowledge …
          </button>
        )}
        {cause.alerts.length > 1 && (
          <button type="button" className="small" aria-expanded={open} onClick={() => setOpen(!open)}>
            {open ? "Less" : `All ${count(cause.alerts.length)}`}
          </button>
        )}
      </div>
      <p className="wrap">
        {first.reason}
        {cause.alerts.length > 1 && (
          <span className="faint"> – the first of {count(cause.alerts.length)}, {count(cause.firing)} firing</span>
        )}
      </p>
      {seen?.note && <p className="wrap faint">{seen.acknowledged_by}: {seen.note}</p>}
      {children}
      {open && <Members alerts={cause.alerts} />}
      {asking && <Acknowledge cause={cause} onClose={() => setAsking(false)} onChanged={onChanged} />}
    </li>
  );
}

function Where(props: { alert: AlertDocument }): ReactNode {
  const { alert } = props;
  const { job } = useShared();
  return (
    <>
      {alert.name && (
        <a href={placeHash({ job, view: "params", query: { name: alert.name } })}>
          <Name>{alert.name}</Name>
        </a>
      )}
      {alert.ranks.slice(0, 8).map((rank) => (
        <a key={rank} href={placeHash({ job, view: "mesh", query: { rank: String(rank) } })}>
          rank {rank}
        </a>
      ))}
    </>
  );
}

function Members(props: { alerts: readonly AlertDocument[] }): ReactNode {
  const { alerts } = props;
  return (
    <ul className="bare list-small" tabIndex={0} aria-label="Alerts of this cause">
      {alerts.slice(0, MEMBERS_SHOWN).map((alert) => (
        <li key={alert.id}>
          <span className="faint">{clock(alert.first_seen_s)}</span> <Badge state={alert.state === "firing" ? alert.severity : "resolved"} /> {alert.rule} <Where alert={alert} />{" "}
          <span className="wrap">{alert.reason}</span>
        </li>
      ))}
      {alerts.length > MEMBERS_SHOWN && <li className="faint">and {count(alerts.length - MEMBERS_SHOWN)} more</li>}
    </ul>
  );
}

const SILENCES = [["0", "not at all"], ["3600", "1 hour"], ["28800", "8 hours"], ["86400", "1 day"], ["604800", "1 week"]] as const;

function Acknowledge(props: { cause: Cause; onClose: () => void; onChanged: () => void }): ReactNode {
  const { cause, onClose, onChanged } = props;
  const { job } = useShared();
  const [note, setNote] = useState("");
  const [silence, setSilence] = useState("0");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const ids = cause.alerts.filter((alert) => alert.state === "firing").map((alert) => alert.id);
  const act = async (): Promise<void> => {
    setBusy(true);
    setProblem("");
    const path = { job };
    try {
      await post("/api/v1/jobs/{job}/alerts/acknowledge", { path, body: { ids, note } });
      if (silence !== "0") {
        for (const [rule] of cause.rules) {
          const subject = cause.alerts.length === 1 ? cause.first.subject : "";
          const body = { rule: rule as NonNullable<SilenceRequest["rule"]>, subject, for_s: Number(silence), note };
          await post("/api/v1/jobs/{job}/alert-silences", { path, body });
        }
      }
      onChanged();
      onClose();
    } catch (error) {
      setProblem(textOf(error));
      setBusy(false);
    }
  };
  return (
    <Dialog title={`Acknowledge ${count(ids.length)} alert${ids.length === 1 ? "" : "s"}`} onClose={onClose}>
      <p>They go on firing until they are over, but no longer count as open. Others see that you have seen them.</p>
      <label className="field">
        Note for the others
        <input type="text" maxLength={1000} value={note} onChange={(event) => setNote(event.target.value)} />
      </label>
      <label className="field">
        Also silence {cause.alerts.length === 1 ? `${cause.first.rule} of ${cause.first.subject}` : cause.rules.map(([rule]) => rule).join(", ")}: no webhooks, not counted
        <select value={silence} onChange={(event) => setSilence(event.target.value)}>
          {SILENCES.map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      </label>
      {problem && <Trouble>{problem}</Trouble>}
      <div className="foot">
        <button type="button" onClick={onClose}>
          Cancel
        </button>
        <button type="button" className="main" disabled={busy} onClick={() => void act()}>
          Acknowledge
        </button>
      </div>
    </Dialog>
  );
}
