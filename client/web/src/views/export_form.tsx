/** The form that starts an export or a schedule. */

import { type FormEvent, type ReactNode, useState } from "react";

import { post } from "../api/client";
import type { DestinationDocument, ExportRequest, ScheduleRequest } from "../api/schema";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";

type ExportOptions = Omit<ExportRequest, "id" | "overwrite">;
type When = "now" | "steps";

interface Draft {
  name: string;
  key: string;
  format: "safetensors" | "dcp";
  shard: string;
  dtype: "" | NonNullable<ExportOptions["dtype"]>;
  buffers: boolean;
  optimizer: boolean;
  overwrite: boolean;
  verify: boolean;
  when: When;
  every: string;
  keep: string;
}

const TIMEOUT_S = 3600;

const EMPTY: Draft = {
  name: "",
  key: "",
  format: "safetensors",
  shard: "5GB",
  dtype: "",
  buffers: true,
  optimizer: false,
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
    assets: [], replica: 0,
  };
}

function requestOf(draft: Draft, name: string): ExportRequest {
  return { ...optionsOf(draft, name), overwrite: draft.overwrite };
}

function scheduleOf(draft: Draft, name: string): ScheduleRequest {
  return {
    ...optionsOf(draft, name),
    every_steps: Number(draft.every),
    keep_last: draft.keep.trim() ? Number(draft.keep) : null,
  };
}

export function ExportForm(props: {
  destinations: readonly DestinationDocument[];
  at: number;
  onStarted: () => void;
}): ReactNode {
  const { destinations, at, onStarted } = props;
  const { job } = useShared();
  const [draft, setDraft] = useState<Draft>(EMPTY);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const set = (patch: Partial<Draft>): void => setDraft({ ...draft, ...patch });
  const name = draft.name || destinations[0]?.name || "";
  const later = draft.when !== "now";
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    const path = { job };
    const sent: Promise<unknown> = later
      ? post("/api/v1/jobs/{job}/export-schedules", { path, body: scheduleOf(draft, name) })
      : post("/api/v1/jobs/{job}/exports", { path, body: requestOf(draft, name) });
    sent
      .then(onStarted)
      .catch((error: unknown) => setProblem(error instanceof Error ? error.message : String(error)))
      .finally(() => setBusy(false));
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
        <Empty>
          No destination is configured: set <code>[destinations]</code> in <code>paramd.toml</code>, or PARAMD_DESTINATIONS.
        </Empty>
      </Panel>
    );
  }
  return (
    <Panel title="Export" source={<Source what="/destinations" at={at} />}>
      <form className="form" onSubmit={submit} aria-label="Export">
        <label className="field broad">
          Destination
          <select name="destination" value={name} onChange={(event) => set({ name: event.target.value })}>
            {destinations.map((one) => (
              <option key={one.name} value={one.name}>
                {one.name} ({one.kind})
              </option>
            ))}
          </select>
        </label>
        <label className="field">
          Folder name
          <input type="text" className="mono" name="key" required spellCheck={false} placeholder="run-7/step-1000" value={draft.key} onChange={(event) => set({ key: event.target.value })} />
        </label>
        <label className="field">
          Format
          <select name="format" value={draft.format} onChange={(event) => set({ format: event.target.value as Draft["format"] })}>
            <option value="safetensors">safetensors</option>
            <option value="dcp">dcp (torch.distributed.checkpoint)</option>
          </select>
        </label>
        {draft.format === "safetensors" && (
          <label className="field">
            Largest file
            <input type="text" name="shard" value={draft.shard} onChange={(event) => set({ shard: event.target.value })} />
          </label>
        )}
        <label className="field">
          dtype
          <select name="dtype" value={draft.dtype} onChange={(event) => set({ dtype: event.target.value as Draft["dtype"] })}>
            <option value="">unchanged</option>
            {["float32", "bfloat16", "float16"].map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <label className="field">
          When
          <select name="when" value={draft.when} onChange={(event) => set({ when: event.target.value as When })}>
            <option value="now">now, once</option>
            <option value="steps">every n steps</option>
          </select>
        </label>
        {later && (
          <>
            <label className="field">
              Every
              <input type="number" min={1} name="every" value={draft.every} onChange={(event) => set({ every: event.target.value })} />
            </label>
            <label className="field">
              Keep the last
              <input type="number" min={1} name="keep" value={draft.keep} onChange={(event) => set({ keep: event.target.value })} />
            </label>
          </>
        )}
        <div className="actions full">
          {(["buffers", "optimizer", "overwrite", "verify"] as const).map((each) => (
            <label className="tick" key={each}>
              <input type="checkbox" checked={draft[each]} onChange={(event) => set({ [each]: event.target.checked })} />
              {{ buffers: "buffers", optimizer: "optimizer", overwrite: "overwrite", verify: "verify" }[each]}
            </label>
          ))}
          <button type="submit" className="main" disabled={busy || !draft.key.trim()}>
            {later ? "Schedule" : "Export"}
          </button>
          {!draft.key.trim() && <span className="faint">enter a folder name first: files are written there</span>}
        </div>
      </form>
      {problem && <Trouble>{problem}</Trouble>}
    </Panel>
  );
}
