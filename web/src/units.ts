export const NONE = "–";

export function number(x: number, digits = 3): string {
  if (!Number.isFinite(x)) return NONE;
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1000) return x.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(x.toPrecision(digits)));
}

function scaled(x: number, base: number, names: string[]): string {
  let i = 0;
  while (Math.abs(x) >= base && i < names.length - 1) {
    x /= base;
    i += 1;
  }
  return `${number(x)}${names[i]}`;
}

export const bytes = (x: number | null | undefined): string =>
  x == null ? NONE : scaled(x, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);

export const count = (x: number): string => scaled(x, 1000, ["", "k", "M", "B", "T"]);

export function seconds(x: number | null | undefined): string {
  if (x == null) return NONE;
  if (x >= 100) return `${number(x)} s`;
  if (x >= 1) return `${number(x)} s`;
  if (x >= 1e-3) return `${number(x * 1e3)} ms`;
  return `${number(x * 1e6)} µs`;
}

export function metric(value: number | null | undefined, unit: string): string {
  if (value == null) return NONE;
  if (unit === "s") return seconds(value);
  if (unit === "bytes" || unit === "B") return bytes(value);
  if (unit.endsWith("/s")) return `${scaled(value, 1000, ["", "k", "M"])} ${unit}`;
  if (unit === "$") return `${number(value)} $`;
  return `${number(value)}${unit ? ` ${unit}` : ""}`;
}

export const percent = (x: number): string => `${number(100 * x, 2)} %`;

export const LABELS: Record<string, string> = {
  tokens_per_s: "Throughput",
  tokens_per_s_per_device: "Throughput per device",
  step_time_s: "Step time",
  mfu: "Model FLOPs utilization",
  hfu: "Hardware FLOPs utilization",
  peak_bytes: "Peak memory per rank",
  exposed_communication_s: "Exposed communication",
  dollars_per_million_tokens: "Cost per million tokens",
  joules_per_token: "Energy per token",
  ttft_s: "Time to first token",
  ttft_p50_s: "Time to first token, median",
  ttft_p99_s: "Time to first token, p99",
  tpot_s: "Time per output token",
  tpot_p50_s: "Time per output token, median",
  tpot_p99_s: "Time per output token, p99",
  e2e_s: "End-to-end latency",
  e2e_p50_s: "End-to-end latency, median",
  requests_per_s: "Requests",
  goodput_per_s: "Goodput",
  batch_mean: "Mean batch",
};

export const label = (name: string): string => LABELS[name] ?? name.replaceAll("_", " ");
