/** Alerts with one cause as one item. */

import { type ReactNode, useMemo, useState } from "react";

import { get } from "../api/client";
import type { Alert, LogTail, Suspect } from "../api/schema";
import { type Cause, ruleText } from "../lib/causes";
import { clock, count, duration, plural } from "../lib/format";
import { lineText, tracebackOf } from "../lib/logs";
import { placeHash } from "../lib/route";
import { Badge, Name } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { useNow, usePoll } from "../ui/hooks";

const MEMBERS_SHOWN = 100;

export function CauseItem(props: { cause: Cause; open?: boolean }): ReactNode {
  const { cause } = props;
  const { first } = cause;
  const now = useNow();
  const [open, setOpen] = useState(props.open ?? false);
  const ended = cause.firing ? now / 1000 : Math.max(...cause.alerts.map((alert) => alert.resolved_s ?? 0));
  return (
    <li className="alert" data-rule={first.rule} data-cause={cause.id}>
      <div className="bar-row">
        <Badge state={cause.firing ? (cause.critical ? "critical" : "warning") : "resolved"} />
        <strong title={cause.rules.map(([rule]) => rule).join(", ")}>{cause.rules.map(([rule, n]) => (n > 1 ? `${ruleText(rule)} × ${count(n)}` : ruleText(rule))).join(", ")}</strong>
        <span className="faint">
          {cause.firing ? "since" : "from"} {clock(first.first_seen_s)}, {duration(Math.max(0, Math.round(ended - first.first_seen_s)))}
        </span>
        <Where alert={first} />
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
      {first.rule === "stale-rank" && cause.firing > 0 && <Lost alert={first} />}
      {first.suspect && <Suspected suspect={first.suspect} />}
      {open && <Members alerts={cause.alerts} />}
    </li>
  );
}

/** The change that the control plane suspects. Its undo is tried before it can be made. */
function Suspected(props: { suspect: Suspect }): ReactNode {
  const { suspect } = props;
  const { job } = useShared();
  const mayEdit = useMay("edit");
  return (
    <p className="suspect">
      Applied {plural(suspect.steps_before, "step")} before: <a href={placeHash({ job, view: "edits", query: { edit: suspect.edit } })}>edit</a> {suspect.what}, by <Name>{suspect.actor}</Name>
      {mayEdit && (
        <a className="spaced" href={placeHash({ job, view: "edits", query: { undo: suspect.edit } })}>
          Try its undo …
        </a>
      )}
    </p>
  );
}

function Where(props: { alert: Alert }): ReactNode {
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

/** The last lines of a rank that was lost, and what one can do. */
function Lost(props: { alert: Alert }): ReactNode {
  const { job, summary } = useShared();
  const rank = props.alert.ranks[0] ?? 0;
  const maySee = useMay("logs");
  const log = usePoll(
    maySee ? `${job}/ranks/${rank}/log` : null,
    (signal) => get("/api/v1/jobs/{job}/ranks/{rank}/log", { path: { job, rank }, query: { lines: LINES }, signal }),
    0,
  );
  return (
    <>
      <LogEnds rank={rank} logs={log.data?.logs ?? NO_LOGS} />
      {summary && summary.joined_count === 0 ? (
        <p className="faint">Its sidecars are gone, and with them its last step. To go on from the newest export, start the training again (with resume="auto").</p>
      ) : (
        <p className="faint">
          To go on from the last step, start the training again (with resume="auto"). To free the memory of what is left: <code>paramd cleanup {job}</code>
        </p>
      )}
    </>
  );
}

/** The traceback first, and whole; then the last lines of each log. */
function LogEnds(props: { rank: number; logs: readonly LogTail[] }): ReactNode {
  const { rank, logs } = props;
  const found = useMemo(() => {
    const all = logs.flatMap((one) => tracebackOf(one.lines, rank) ?? []);
    return all.find((one) => one.rank === rank) ?? all.find((one) => one.rank === -1) ?? all[0];
  }, [logs, rank]);
  return (
    <>
      {found && (
        <>
          <p className="faint">
            {found.rank === -1 ? `The traceback in the log of rank ${rank}` : `Traceback of rank ${found.rank}`}
            {found.rank !== -1 && found.rank !== rank ? `; rank ${rank} left none` : ""}:
          </p>
          <pre className="log wrapped" tabIndex={0} role="region" aria-label={`Traceback, rank ${found.rank === -1 ? rank : found.rank}`}>
            {found.lines.join("\n")}
          </pre>
        </>
      )}
      {logs
        .filter((one) => one.lines.length > 0)
        .map((one) => (
          <details key={one.source} open={!found}>
            <summary className="faint">
              Last lines of {one.source}, rank {rank}
            </summary>
            <pre className="log wrapped" tabIndex={0} role="region" aria-label={`Last lines of rank ${rank}: ${one.source}`}>
              {one.lines.slice(-LAST).map(lineText).join("\n")}
            </pre>
          </details>
        ))}
    </>
  );
}

const NO_LOGS: readonly LogTail[] = [];
/** A traceback through torch and a launcher is this long. */
const LINES = 300;
/** Of each log, beside the traceback. */
const LAST = 8;

function Members(props: { alerts: readonly Alert[] }): ReactNode {
  const { alerts } = props;
  return (
    <ul className="bare list-small" tabIndex={0} aria-label="Alerts of this cause">
      {alerts.slice(0, MEMBERS_SHOWN).map((alert) => (
        <li key={alert.id}>
          <span className="faint">{clock(alert.first_seen_s)}</span> <Badge state={alert.state === "firing" ? alert.severity : "resolved"} /> {ruleText(alert.rule)} <Where alert={alert} />{" "}
          <span className="wrap">{alert.reason}</span>
        </li>
      ))}
      {alerts.length > MEMBERS_SHOWN && <li className="faint">and {count(alerts.length - MEMBERS_SHOWN)} more</li>}
    </ul>
  );
}
