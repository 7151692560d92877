/** Starts an export, or a schedule of them, to a destination that the operator has named. */

import { type FormEvent, type ReactNode, useState } from "react";

import { raw } from "../api/client";
import type { DestinationDocument } from "../api/documents";
import { Empty, Panel, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";

type When = "now" | "steps" | "seconds";

interface Draft {
  name: string;
  key: string;
  format: "safetensors" | "dcp";
  shard: string;
  dtype: string;
  buffers: boolean;
  optimizer: boolean;
  overwrite: boolean;
  verify: boolean;
  when: When;
  every: string;
  keep: string;
}

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

function bodyOf(draft: Draft, name: string): Record<string, unknown> {
  const include = ["parameters", ...(draft.buffers ? ["buffers"] : []), ...(draft.optimizer ? ["optimizer"] : [])];
  const body: Record<string, unknown> = {
    destination: `${name}/${draft.key.trim()}`,
    format: draft.format,
    include,
    verify: draft.verify,
  };
  if (draft.format === "safetensors" && draft.shard.trim()) body["max_shard_size"] = draft.shard.trim();
  if (draft.dtype) body["dtype"] = draft.dtype;
  if (draft.overwrite) body["overwrite"] = true;
  if (draft.when !== "now") {
    body[draft.when === "steps" ? "every_steps" : "every_s"] = Number(draft.every);
    if (draft.keep.trim()) body["keep_last"] = Number(draft.keep);
  }
  return body;
}

export function ExportForm(props: {
  destinations: readonly DestinationDocument[];
  onStarted: () => void;
}): ReactNode {
  const { destinations, onStarted } = props;
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
    raw("post", `/api/v1/jobs/{job}/${later ? "export-schedules" : "exports"}`, { path: { job }, body: bodyOf(draft, name) })
      .then(onStarted)
      .catch((error: unknown) => setProblem(error instanceof Error ? error.message : String(error)))
      .finally(() => setBusy(false));
  };
  if (destinations.length === 0) {
    return (
      <Panel title="Export">
        <Empty>
          The operator has named no destination: <code>[destinations]</code> in <code>paramd.toml</code>, or PARAMD_DESTINATIONS.
        </Empty>
      </Panel>
    );
  }
  return (
    <Panel title="Export" source={<span className="source">/destinations</span>}>
      <form className="form" onSubmit={submit} aria-label="Export">
        <label className="field">
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
          Key within it
          <input type="text" className="mono" name="key" required spellCheck={false} placeholder={later ? "run-7/step-{step}" : "run-7/step-1000"} value={draft.key} onChange={(event) => set({ key: event.target.value })} />
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
          <select name="dtype" value={draft.dtype} onChange={(event) => set({ dtype: event.target.value })}>
            <option value="">as it is</option>
            {["float32", "bfloat16", "float16"].map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <label className="field">
          When
          <select name="when" value={draft.when} onChange={(event) => set({ when: event.target.value as When })}>
            <option value="now">now, once</option>
            <option value="steps">every so many steps</option>
            <option value="seconds">every so many seconds</option>
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
              {{ buffers: "buffers", optimizer: "optimizer", overwrite: "replace what is there", verify: "verify" }[each]}
            </label>
          ))}
          <button type="submit" className="main" disabled={busy || !draft.key.trim()}>
            {later ? "Schedule" : "Export"}
          </button>
        </div>
      </form>
      {problem && <Trouble>{problem}</Trouble>}
    </Panel>
  );
}
