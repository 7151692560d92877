/** What updates do to each parameter: a table to sort, its cells shaded. Asked for, never polled. */

import { type ReactNode, useState } from "react";

import { get } from "../api/client";
import type { UpdateRow } from "../api/schema";
import { percent } from "../lib/format";
import { Choice, Empty, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";
import { type Measure, MeasureTable } from "./measures";

const STEPS = [["1", "1 step"], ["10", "10 steps"], ["100", "100 steps"]] as const;

export const MEASURES: readonly Measure<UpdateRow>[] = [
  { key: "norm", title: "update norm", of: (row) => row.norm },
  { key: "ratio", title: "ratio", of: (row) => row.ratio },
  { key: "max", title: "max", of: (row) => row.max_abs },
  { key: "changed", title: "changed", of: (row) => (row.numel ? row.changed / row.numel : null), text: (row) => percent(row.changed, row.numel) },
  { key: "moment", title: "v RMS", of: (row) => row.moment_rms },
  { key: "lr", title: "lr / √v", of: (row) => row.effective_lr },
];

export function Changes(): ReactNode {
  const { job } = useShared();
  const mayRead = useMay("read");
  const [steps, setSteps] = useQuery("steps", "1");
  const [sort, setSort] = useQuery("order", "-ratio");
  const [asked, setAsked] = useState(0);
  const updates = usePoll(
    asked > 0 ? `${job}/updates/${steps}/${asked}` : null,
    (signal) => get("/api/v1/jobs/{job}/updates", { path: { job }, query: { steps: Number(steps) }, signal }),
    0,
  );
  const found = updates.data;
  return (
    <Panel
      title="Changes"
      source={<Source what={`/jobs/${job}/updates`} at={updates.at} step={found?.updates[0]?.step} incarnation={found?.incarnation} error={updates.error} busy={updates.busy} />}
      actions={
        <>
          <Choice label="Over" value={STEPS.find(([one]) => one === steps)?.[0] ?? "1"} options={STEPS} onChange={setSteps} />
          <button type="button" disabled={!mayRead || updates.busy} onClick={() => setAsked(asked + 1)}>
            Compare
          </button>
        </>
      }
    >
      {updates.error && <Trouble>{updates.error}</Trouble>}
      {!found && !updates.error && (
        <Empty>{mayRead ? "Waits for the next step and shows what it changed." : "Needs a reader's token."}</Empty>
      )}
      {found?.moments_missing && <p className="faint">No second moments: {found.moments_missing}</p>}
      {found && (
        <MeasureTable
          label="Changes"
          rows={found.updates}
          measures={MEASURES}
          sort={sort}
          onSort={setSort}
          onPick={(name) => patchQuery({ as: "", name, part: "compare" })}
          leads="the change of its cells"
        />
      )}
    </Panel>
  );
}
