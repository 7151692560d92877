/** The form that starts an export or a schedule. */

import { type FormEvent, type ReactNode, useState } from "react";

import { post } from "../api/client";
import type { DestinationDocument, ExportRequest, ScheduleRequest } from "../api/schema";
import { defaultKey, STEP } from "../lib/checkpoint";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { Select, Text, Tick, useSending } from "../ui/form";

type ExportOptions = Omit<ExportRequest, "id" | "overwrite">;
type When = "now" | "steps";

export interface Draft {
  name: string;
  key: string;
  format: "safetensors" | "dcp" | "peft";
  shard: string;
  dtype: "" | NonNullable<ExportOptions["dtype"]>;
  buffers: boolean;
  optimizer: boolean;
  merge: boolean;
  adapter: string;
  weightsFrom: string;
  overwrite: boolean;
  verify: boolean;
  when: When;
  every: string;
  keep: string;
}

const TIMEOUT_S = 3600;

export const EMPTY: Draft = {
  name: "",
  key: "",
  format: "safetensors",
  shard: "5GB",
  dtype: "",
  buffers: true,
  optimizer: false,
  merge: false,
  adapter: "",
  weightsFrom: "",
  overwrite: false,
  verify: true,
  when: "now",
  every: "1000",
  keep: "3",
};

function optionsOf(draft: Draft, name: string): ExportOptions {
  const include: ExportOptions["include"] = ["parameters"];
  if (draft.buffers) include.push("buffers");
  if (draft.optimizer) include.push("optimizer");
  return {
    destination: `${name}/${draft.key.trim()}`,
    format: draft.format,
    include,
    verify: draft.verify,
    max_shard_size: draft.shard.trim() || "5GB",
    dtype: draft.dtype || null,
    tied: "drop",
    name_map: {},
    patterns: [],
    timeout_s: TIMEOUT_S,
    assets: [],
    replica: 0,
    adapter: draft.merge || draft.format === "peft" ? draft.adapter.trim() : "",
    merge: draft.merge,
    weights_from: draft.weightsFrom.trim(),
  };
}

export function requestOf(draft: Draft, name: string): ExportRequest {
  return { ...optionsOf(draft, name), overwrite: draft.overwrite };
}

function scheduleOf(draft: Draft, name: string): ScheduleRequest {
  return {
    ...optionsOf(draft, name),
    every_steps: Number(draft.every),
    keep_last: draft.keep.trim() ? Number(draft.keep) : null,
  };
}

const isCount = (text: string): boolean => Number.isSafeInteger(Number(text)) && Number(text) >= 1;

export function ExportForm(props: {
  destinations: readonly DestinationDocument[];
  at: number;
  onStarted: () => void;
}): ReactNode {
  const { destinations, at, onStarted } = props;
  const { job, jobs } = useShared();
  const [draft, setDraft] = useState<Draft>({ ...EMPTY, key: defaultKey(job, jobs) });
  const { busy, problem, send } = useSending();
  const set = (patch: Partial<Draft>): void => setDraft({ ...draft, ...patch });
  const name = draft.name || destinations[0]?.name || "";
  const later = draft.when !== "now";
  const counted = !later || (isCount(draft.every) && (!draft.keep.trim() || isCount(draft.keep)));
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    const path = { job };
    send<unknown>(later ? post("/api/v1/jobs/{job}/export-schedules", { path, body: scheduleOf(draft, name) }) : post("/api/v1/jobs/{job}/exports", { path, body: requestOf(draft, name) }), onStarted);
  };
  if (at === 0) {
    return (
      <Panel title="Export">
        <div className="form-space">
          <Empty>Loading …</Empty>
        </div>
      </Panel>
    );
  }
  if (destinations.length === 0) {
    return (
      <Panel title="Export">
        <NoDestination />
      </Panel>
    );
  }
  return (
    <Panel title="Export" source={<Source what="/destinations" at={at} />}>
      <form className="form" onSubmit={submit} aria-label="Export">
        <Target all={destinations} name={name} draft={draft} onChange={setDraft} />
        <Select label="Format" name="format" value={draft.format} options={FORMATS} onChange={(format) => set({ format: format as Draft["format"] })} />
        {draft.format === "safetensors" && <Text label="Largest file" name="shard" value={draft.shard} onChange={(shard) => set({ shard })} />}
        <Select label="dtype" name="dtype" value={draft.dtype} options={DTYPES} onChange={(dtype) => set({ dtype: dtype as Draft["dtype"] })} />
        <Text label="Averaged weights" name="weights_from" placeholder="none: as trained" value={draft.weightsFrom} onChange={(weightsFrom) => set({ weightsFrom })} />
        {(draft.merge || draft.format === "peft") && <Text label="Adapter" name="adapter" placeholder="the only one" value={draft.adapter} onChange={(adapter) => set({ adapter })} />}
        <Select label="When" name="when" value={draft.when} options={WHENS} onChange={(when) => set({ when: when as When })} />
        {later && <Text label="Every" name="every" numeric min={1} required value={draft.every} onChange={(every) => set({ every })} />}
        {later && <Text label="Keep the last" name="keep" numeric min={1} value={draft.keep} onChange={(keep) => set({ keep })} />}
        <div className="actions full">
          {TICKS.map(([each, label]) => (
            <Tick key={each} label={label} checked={draft[each]} onChange={(checked) => set({ [each]: checked })} />
          ))}
          <button type="submit" className="main" disabled={busy || !draft.key.trim() || !counted}>
            {later ? "Schedule" : "Export"}
          </button>
          {draft.key.includes(STEP) && <span className="faint">{STEP} becomes the step of the files</span>}
          {!draft.key.trim() && <span className="faint">enter a folder name first: files are written there</span>}
          {draft.weightsFrom.trim() && <span className="faint">the name of a model given to attach, of a state that the optimizers keep (such as ema), or schedule-free</span>}
          {!counted && <span className="faint">both numbers are whole, 1 or more; without “Keep the last” all are kept</span>}
        </div>
      </form>
      {problem && <Trouble>{problem}</Trouble>}
    </Panel>
  );
}

const FORMATS = [["safetensors", "safetensors"], ["dcp", "dcp (torch.distributed.checkpoint)"], ["peft", "peft (the adapter alone)"]] as const;
const TICKS = [["buffers", "buffers"], ["optimizer", "optimizer"], ["merge", "merge the adapter"], ["overwrite", "overwrite"], ["verify", "verify"]] as const;
const DTYPES = [["", "unchanged"], ["float32", "float32"], ["bfloat16", "bfloat16"], ["float16", "float16"]] as const;
const WHENS = [["now", "now, once"], ["steps", "every n steps"]] as const;

export function NoDestination(): ReactNode {
  return (
    <Empty>
      No destination is configured: set <code>[destinations]</code> in <code>paramd.toml</code>, or PARAMD_DESTINATIONS.
    </Empty>
  );
}

/** Where an export goes. */
export function Target(props: { all: readonly DestinationDocument[]; name: string; draft: Draft; onChange: (draft: Draft) => void }): ReactNode {
  const { all, name, draft, onChange } = props;
  return (
    <>
      <Select label="Destination" name="destination" wide="broad" value={name} options={all.map((one) => [one.name, `${one.name} (${one.kind})`] as const)} onChange={(chosen) => onChange({ ...draft, name: chosen })} />
      <Text label="Folder name" name="key" mono required placeholder={`step-${STEP}`} value={draft.key} onChange={(key) => onChange({ ...draft, key })} />
    </>
  );
}
