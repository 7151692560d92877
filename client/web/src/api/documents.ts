/** Documents of edits and holds, after docs/design.md. */

export interface Measured {
  min: number | null;
  max: number | null;
  mean: number | null;
  norm: number | null;
  nan_count: number;
  inf_count: number;
}

export interface EditOp {
  pattern: string;
  op: string;
  value?: number | null;
  weight?: number | null;
  min?: number | null;
  max?: number | null;
  data?: boolean;
  names: string[];
  name_count: number;
  numel: number;
}

export interface EditDocument {
  id: string;
  job: string;
  epoch: number;
  state: string;
  reason: string;
  actor: string;
  note: string;
  created_s: number;
  ended_s: number | null;
  step: number;
  boundary: number;
  ops: EditOp[];
  size_bytes: number;
  stop_ms: number | null;
  before: Measured | null;
  after: Measured | null;
  undo: { possible: boolean; reason: string };
  undo_of: string | null;
  undone_by: string | null;
}

export interface EditPage {
  edits: EditDocument[];
  next_page_token: string;
}

export interface HoldDocument {
  state: string;
  holder: string;
  step: number;
  steps_left: number;
  lease_left_s: number;
  since_s: number | null;
}
