/** The end of one rank's logs. Asked for, never polled: they are read from disk. */

import { type ReactNode, useState } from "react";

import { get } from "../api/client";
import type { LogTail } from "../api/schema";
import { lineText } from "../lib/logs";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";

const LINES = 200;

export function LogPanel(props: { rank: number }): ReactNode {
  const { rank } = props;
  const { job } = useShared();
  const maySee = useMay("logs");
  const [asked, setAsked] = useState(false);
  const log = usePoll(
    asked && maySee ? `${job}/ranks/${rank}/log` : null,
    (signal) => get("/api/v1/jobs/{job}/ranks/{rank}/log", { path: { job, rank }, query: { lines: LINES }, signal }),
    0,
  );
  return (
    <Panel
      title={`Log of rank ${rank}`}
      source={<Source what={`/jobs/${job}/ranks/${rank}/log`} at={log.at} error={log.error} busy={log.busy} />}
      actions={
        <button type="button" disabled={!maySee || log.busy} onClick={() => (asked ? log.refresh() : setAsked(true))}>
          {asked ? "Read again" : "Read the log"}
        </button>
      }
    >
      {log.error && <Trouble>{log.error}</Trouble>}
      {log.data?.error && <Trouble>{log.data.error}</Trouble>}
      {!log.data && !log.error && (
        <Empty>
          {maySee
            ? "The last lines of its sidecar, and of its trainer if that writes to a file."
            : "Needs an editor's token: whatever the script prints is in it."}
        </Empty>
      )}
      {log.data?.logs.map((one) => <Tail key={one.source} rank={rank} tail={one} />)}
    </Panel>
  );
}

/** As text: what the script printed must not be read as markup. */
function Tail(props: { rank: number; tail: LogTail }): ReactNode {
  const { rank, tail } = props;
  return (
    <>
      <h3>{tail.source}</h3>
      {tail.missing ? (
        <Empty>{tail.missing}</Empty>
      ) : (
        <pre className="log wrapped" tabIndex={0} role="region" aria-label={`${tail.source} of rank ${rank}`}>
          {tail.lines.map(lineText).join("\n")}
        </pre>
      )}
    </>
  );
}
