/** Checkpoints: what they are called, and the lines that load one. Pure. */

/** The control plane writes the step of the files in the place of this. */
export const STEP = "{step}";

/** The folder of a checkpoint: several jobs that share a destination have a folder each. */
export function defaultKey(job: string, jobs: readonly { job: string }[]): string {
  return jobs.length > 1 ? `${job}/step-${STEP}` : `step-${STEP}`;
}

/**
 * A script that loads a checkpoint into a model, whole and strictly: a name that is missing or too
 * many is an error. It works on any model, and sharded ones (FSDP2) on all ranks at once.
 *
 * The script itself compares the names: with `full_state_dict`, torch fills in what is missing from
 * the model before it looks, so that its `strict` refuses only names that are too many.
 */
export function loadText(format: string, place: string): string {
  if (place.startsWith("s3://")) {
    const folder = place.split("/").at(-1) ?? "";
    return `aws s3 cp --recursive ${place} ${folder}`;
  }
  const at = JSON.stringify(place);
  if (format === "peft") return [`from peft import PeftModel`, `model = PeftModel.from_pretrained(base, ${at})`].join("\n");
  if (format === "dcp") return DCP.replace(PLACE, () => at);
  return SAFETENSORS.replace(PLACE, () => at);
}

const PLACE = "PLACE";

const SAFETENSORS = `import json
from pathlib import Path

from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

folder = Path(PLACE)
manifest = json.loads((folder / "paramd-export.json").read_text())
state = {}
for file in sorted(folder.glob("model*.safetensors")):
    state |= load_file(file)
for file in folder.glob("extra_state.json"):
    state |= json.loads(file.read_text())
for name, first in manifest["tied"].items():
    state.setdefault(name, state[first])
lacking = get_model_state_dict(model).keys() - state.keys() - manifest["missing"].keys()
if lacking:
    raise KeyError(f"{folder} lacks {sorted(lacking)}")
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=True))`;

const DCP = `import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optimizer_state}
dcp.load(state, checkpoint_id=PLACE)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])`;
