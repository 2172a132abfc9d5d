// What the server answers. Units are SI: seconds, bytes, FLOP/s.

export interface Metric {
  value: number;
  unit: string;
  low: number | null;
  high: number | null;
  better: "lower" | "higher" | "";
  source: string;
}

export interface Result {
  source: "predicted" | "measured";
  name: string;
  status: string;
  reason: string;
  metrics: Record<string, Metric>;
  memory: { category: string; bytes: number; device: string }[];
  notes?: string[];
  samples?: { step: number; loss: number | null; seconds: number }[];
  distributions?: Record<string, number[]>;
}

export interface Outcome {
  name: string;
  plan: string[];
  predicted: Result | null;
  measured: Result | null;
  speedup: Metric | null;
  predicted_speedup: number | null;
  verdict: string;
}

export interface Ablation {
  name: string;
  baseline: string;
  outcomes: Outcome[];
  notes: string[];
  environment: Record<string, unknown>;
}

export interface Part {
  name: string;
  seconds: number;
  share: number;
  bound: string;
  note: string;
  children: Part[];
}

export interface Remedy {
  change: string;
  call: string;
  peak_bytes: number;
  fits: boolean;
  tokens_per_s: number;
  lossless: boolean;
}

export type Bar = [stream: string, phase: string, name: string, start: number, end: number];

export interface State {
  state: "on" | "off" | "refused";
  why: string;
}

export interface Answer {
  result: Result;
  cluster: { label: string; size: number; memory_bytes: number; reserved_bytes: number };
  plan: string[];
  states: Record<string, State>;
  chip: ChipAnswer | null;
  tree: Part | null;
  timeline: Bar[];
  command: string;
  toml: string;
}

/** What a chip takes and gives; areas in mm². */
export interface ChipAnswer {
  peak_flops: Record<string, number>;
  memory_bandwidth: number;
  memory_bytes: number;
  area_mm2: Record<string, number>;
  total_mm2: number;
  edge_mm: number;
  shoreline_mm: number;
  watts: number;
  prices: string;
  dies_per_wafer: number;
  yield: number;
  die_dollars: number;
  memory_dollars: number | null;
  tokens_per_s_per_dollar: number | null;
  operators: { name: string; intensity: number; rate: number; seconds: number }[];
}

/** A chip of the catalog, and the figures of its design that can be changed. */
export interface Chip {
  name: string;
  title: string;
  source: string;
  figures: { path: string; label: string; value: number }[];
}

export interface Option {
  name: string;
  type: string;
  default: unknown;
  help: string;
}

export interface Technique {
  name: string;
  title: string;
  summary: string;
  paper: string;
  family: string;
  tasks: string[];
  lossless: boolean;
  claim: string;
  quality: string;
  runs: boolean;
  options: Option[];
  example: Record<string, unknown>;
  default_in: string[];
}

export interface Model {
  name: string;
  family: string;
  parameters: number;
  layers: number;
  hidden_size: number;
  max_positions: number;
  aliases: string[];
}

export interface Device {
  name: string;
  title: string;
  kind: string;
  vendor: string;
  architecture: string;
  year: number;
  peak_flops: Record<string, number>;
  memory_bytes: number;
  memory_bandwidth: number;
  watts: number;
  price_per_hour: number;
  source: string;
  measured: boolean;
  link: { name: string; bandwidth: number } | null;
  host_link: { name: string; bandwidth: number } | null;
  network: { name: string; bandwidth: number } | null;
}

export interface System {
  name: string;
  title: string;
  paper: string;
  claim: string;
  plan: string[];
}

export interface Catalog {
  models: Model[];
  devices: Device[];
  chips: Chip[];
  techniques: Technique[];
  systems: System[];
}

export interface PlanQuery {
  model: string | Record<string, unknown>;
  on: string;
  device: Record<string, number>;
  workload: Record<string, unknown>;
  plan: string[];
}

export interface Tried {
  plan: string[];
  brief: string[];
  against_first?: string;
  on: string;
  batch_size: number | null;
  micro_batch_size: number | null;
  metrics: Record<string, number>;
  toml: string;
}

export interface Found {
  goal: string;
  metric: string;
  best: Tried[];
  front: Tried[];
  why_not: { what: string; because: string; therefore: string }[];
  closest_miss: (Tried & { misses: string }) | null;
  relaxations: { change: string; plan: string[] }[];
  counts: Record<string, number>;
  seconds: number;
}

export interface Study {
  name: string;
  title: string;
  source: string;
  cells: { status: string }[];
  findings: { says: string; reported: string; predicted: number | null; measured: number | null; verdict: string; note: string }[];
}

export interface RunLine {
  id: string;
  created: string;
  kind: string;
  source: string;
  name: string;
  model: string;
  plan: string;
  tokens_per_s: number | null;
  step_time_s: number | null;
  peak_bytes: number | null;
  status: string;
  tags: string[];
}

export interface LiveJob {
  id: string;
  kind: string;
  title: string;
  plan: string;
  ranks: number;
  started: number;
  stage: string;
  step: number;
  steps: number;
  loss: number | null;
  tokens_per_s: number | null;
  losses: [number, number][];
  memory_bytes: number;
}

export interface Mistake {
  what: string;
  fix: string;
}
